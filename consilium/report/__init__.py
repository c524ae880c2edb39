"""Reports on runs: model cards, comparisons, curves, and papers' claims. Only export needs torch.

card.py        the facts of a card: the schema of the signed document
facts.py       collects the facts from a run's record; export.py: writes the run's model with its card
signed_card.py signature and checks: the signer, the authority, and whether the files in the card's folder match it
templates      the texts: the card as Markdown and as a page, an impact assessment (GDPR), technical documentation
               (AI Act); documents.py fills them in
comparison.py  several runs side by side; curves.py: a measure over rounds
papers.py      papers of the methods, their claims, and which of them reproduce
commands.py    `card verify` and `card write` of both command lines; lead.py, hospital.py: the commands of each side
"""
