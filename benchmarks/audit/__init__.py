"""The audits over five seeds, and the faults that they must see: numbers and figures."""
