"""The bundled model: its data, its training and its evaluation. Run the scripts as modules, from the project root."""
