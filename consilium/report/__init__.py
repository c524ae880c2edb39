"""What is said of runs: the card of a model, comparisons, curves, and what papers claim. Only export needs torch.

card.py        the facts: the schema of the document that is signed
facts.py       collects them from a run's record; export.py: writes the run's model with its card
signed_card.py signature and checks: who signed, under which authority, whether the files beside it are those it names
templates      the sentences: the card as Markdown and as a page, an impact assessment (GDPR), technical documentation
               (AI Act); documents.py fills them in
comparison.py  several runs side by side; curves.py: a measure over rounds
papers.py      where methods are from, what their papers claim, and what of it reproduces
commands.py    `card verify` and `card write` of both command lines; lead.py, hospital.py: the commands of each side
"""
