"""Run tables: python -m benchmarks.paper table=fedmr_1 scale=small."""

from benchmarks.paper.run import main

if __name__ == "__main__":
    main()
