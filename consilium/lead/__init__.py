"""Lead a federation from Python, like the commands `coordinator run`, `watch`, `silos`, `survey` and `export`.

lead        `consilium.connect`, and the connected lead: hospitals, runs, surveys, evaluations
connection  their shared connection
run         a run: watch it, also in a notebook; its numbers, model and card
listing     lists that terminals and notebooks show as tables
"""

from service_core.tls.connect import require_tls13, silence_grpc_logs

require_tls13()  # before anything imports gRPC, as the commands do
silence_grpc_logs()
