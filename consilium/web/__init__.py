"""Serve pages on loopback only, with access checks. Pages also work without JavaScript.

guard       checks every request, and sets the headers of every answer; the opening link (once, ten minutes), cookies,
            the token in forms
site        the parts of a page: `Site`, `View`, `Action`, `Download`; its application
serve       `PageServer`: listens, renews the link's private file, stops
rendering   templates: escaped, strict, no invisible characters; `templates/base.html` and the macros of `parts.html`;
            gauges
chart       curves as SVG with a table
command     common code of the `page` commands

A program creates a `Site` and serves it:

    site = Site(
        title="north",
        command="silo page",  # for a new link
        templates=Path(...),  # the page's own templates, in addition to those of `consilium.web`
        views={"/": View("home.html", facts)},  # facts(parameters) -> the template's data
        actions={"/approve": Action(digest=..., do=...)},  # a POST; token and digest are checked before `do`
        download=lambda id: ...,  # a Download, or None
        version=lambda: ...,  # a text that changes whenever the shown data change
    )
    with PageServer(site, folder) as server:
        server.link, server.file  # it is listening now

Functions of a `Site` run on worker threads, several at once. Their errors are shown: `MissingError` with status 404,
`ChangedError` and every FederationError with 409. A view's path may have parameters, such as `/runs/{run}`.
"""
