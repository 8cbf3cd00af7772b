"""Results as pages, plots, tables and videos."""
