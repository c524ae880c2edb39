"""The program of ablations; what processes of their own run lies in a module that they can import."""

import sys

from consilium.research.simulate.ablation.program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
