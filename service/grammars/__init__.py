"""Grammars that constrain answers: from a request's constraint to what the engine follows token by token."""
