"""What ten thousand adapters cost, and what becomes of requests while adapters are replaced."""
