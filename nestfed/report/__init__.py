"""Tables, plots and HTML reports of runs."""
