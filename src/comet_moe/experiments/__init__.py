"""The experiments: configurations, data sets, training, studies and reports."""
