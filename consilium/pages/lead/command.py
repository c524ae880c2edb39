"""`coordinator page`."""

from __future__ import annotations

from functools import partial

from consilium.web.command import Bind, Browser, serve_until_stopped
from coordinator.cli.options import Place
from coordinator.lead.client import LeadClient, credentials_of
from service_core.command_line import Json, command


@command
def page(bind: Bind = None, browser: Browser = True, as_json: Json = False, *, home: Place) -> None:
    """Show the lead's page until Ctrl-C: hospitals, runs, curves and problems. Start runs and download models there.

    It connects to the running service as the lead that CONSILIUM_LEAD names. If the service stops, it keeps showing the
    last answers. Only you, on this machine, can open it, with a link that works once; the file always contains a new
    link. There is also a command for each button.
    """
    from consilium.pages.lead.exports import Exporter
    from consilium.pages.lead.service_watch import ServiceWatch
    from consilium.pages.lead.site import LeadPage, own_certificates

    certificates, consortium = own_certificates(credentials_of(home))
    connect = partial(LeadClient.open, home, certificates.lead)
    watch, exporter = ServiceWatch(connect), Exporter(home, connect)
    site = LeadPage(watch, connect, exporter, certificates, consortium).site()
    watch.start()
    try:
        serve_until_stopped(site, home, bind, browser, as_json, lambda facts: [f"{n:<8} {v}" for n, v in facts])
    finally:
        watch.stop()
        exporter.close()
