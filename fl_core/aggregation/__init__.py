"""From silo updates to one exact sum: the fixed-point format, the aggregator, guards whose settings follow."""
