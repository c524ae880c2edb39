"""The tests mirror the source tree; `support` is what they share, `contract` what every method and port must do."""
