"""The papers' figures and tables: what is run, what was published and claimed, and how a claim is judged."""
