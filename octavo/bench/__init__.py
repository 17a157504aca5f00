"""Timing, rooflines, records, plots and pages. A figure is a record first; plots are drawn from records."""
