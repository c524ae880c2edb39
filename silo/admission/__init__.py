"""The one door at the hospital: what is asked of it, what it answers, and what it remembers of its answers.

`controls` admits a question, by the policy (`policy_in_force`), the hospital's decision, the ledger and the memory;
`floors` is the fewest that anything which leaves may be of; `memory` holds what was answered, by the models that were
measured and, with `survey_history`, by the people who were counted; `surveys` makes what is told of records;
`run_request` words a question for whoever decides; `private_readiness` names all that a private run still lacks.
"""
