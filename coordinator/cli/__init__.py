"""The commands of `coordinator`, grouped by who uses them."""
