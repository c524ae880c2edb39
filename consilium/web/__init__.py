"""What all pages are served with: guarded, on loopback alone, without JavaScript where there is none.

guard       what is refused of a request, and the headers of every answer; the opening link (once, ten minutes),
            cookies, the token in forms
site        what a page is made of: `Site`, `View`, `Action`, `Download`; its application
serve       `PageServer`: listens, keeps the link's private file fresh, ends
rendering   templates: escaped, strict, no invisible characters; `templates/base.html` and the macros of `parts.html`
chart       a curve as SVG with a table; a share of something as SVG with a sentence
command     what each command `page` does

A program makes a `Site` and serves it:

    site = Site(
        title="north",
        command="silo page",  # for a new link
        templates=Path(...),  # the page's own templates, beside those of `consilium.web`
        views={"/": View("home.html", facts)},  # facts(parameters) -> what the template needs
        actions={"/approve": Action(digest=..., do=...)},  # a POST; token and digest were compared before `do`
        download=lambda id: ...,  # a Download, or None
        version=lambda: ...,  # another text whenever something that is shown has changed
    )
    with PageServer(site, folder) as server:
        server.link, server.file  # it listens by now

Functions of a `Site` run on worker threads, several at once. What they raise is shown: `MissingError` with status 404,
`ChangedError` and every FederationError with 409. A view's path may have parameters, as `/runs/{run}`.
"""
