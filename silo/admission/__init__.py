"""The one door at the hospital: what a coordinator asks, what the hospital answers, and what it remembers of that.

`controls` admits a run, its data and each task; only an admitted task can open records. It asks the policy
(`policy_in_force`), the hospital's decision, the ledger and the memory. `floors` has the smallest counts that may
leave. `memory` keeps what was answered about models, `survey_history` what was answered about people. `census` checks
the proof of a census. `surveys` answers surveys. `run_request` describes a run to whoever decides, and
`private_readiness` lists what a private run still lacks.
"""
