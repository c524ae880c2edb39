"""The single entry point to the hospital: every request of a coordinator is admitted or refused here.

`controls` admits a run, its data and each task; only an admitted task can open records. It asks the policy
(`policy_in_force`), the hospital's decision, the ledger and the memory of earlier answers. `floors` has the smallest
counts that may leave. `memory` remembers answers about models, `survey_history` answers about people. `census` checks
the proof of a census. `surveys` answers surveys. `run_request` describes a run to the person who decides about it, and
`private_readiness` lists what a private run still needs.
"""
