"""`python -m benchmarks.comparison NAME`."""

from benchmarks.comparison.run import main

if __name__ == "__main__":
    main()
