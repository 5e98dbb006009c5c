"""Regime 3: a statistic of one layer's gradient comes first, so that gradient lives as long as its backward."""
