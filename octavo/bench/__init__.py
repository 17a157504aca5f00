"""Timing, rooflines, records, plots and pages made of them. A figure is a record first; plots are drawn from records."""
