"""The command line: thin functions that call the library."""
