"""The card of a model as one signed document, and what is written from it. Only export needs torch.

card.py        what a card says: the schema of the document
signed_card.py signature and checks: who signed, under which authority, whether the files beside it are those it names
sentences.py   what follows from a card, a sentence each with the fields that it rests on
documents.py   the page, and skeletons of an impact assessment (GDPR) and of technical documentation (AI Act)
commands.py    `card verify` and `card write` of both command lines; hospital.py: those of the hospital's
board_card.py  makes a card of a run; export.py: writes its model with the card
"""
