"""`multilora first-host`: what is unknown of a host is settled by one command, which writes one report."""
