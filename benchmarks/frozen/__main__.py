"""`python -m benchmarks.frozen`."""

from benchmarks.frozen.run import main

if __name__ == "__main__":
    main()
