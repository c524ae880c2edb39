"""Run the study: python -m benchmarks.fedmr_digits."""

from benchmarks.fedmr_digits.run import main

main()
