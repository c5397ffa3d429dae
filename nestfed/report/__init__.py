"""What people look at: metrics, tables, plots."""
