"""The dashboard at `/ui`: pages rendered on the server, and the toolkit with which parts add their own pages.

How a part adds pages
---------------------
A part names a `Pages` object in its attribute `pages`, as text, so that nothing is imported before it is needed:

    class LettersPart(Part):
        name = "letters"
        pages = ("letters.pages:pages",)

`Pages` is a FastAPI router. It adds links to the menu, and the folder `templates` of its package:

    # letters/pages.py
    from batchwright.web.pages import Link, Pages
    from batchwright.web.visit import Operator, Reader, Visit

    pages = Pages("letters", package="letters", links=[Link("Letters", "/ui/letters", group="Work", order=30)])

    @pages.get("/ui/letters")
    async def list_letters(visit: Reader, status: str | None = None, cursor: str | None = None) -> Response:
        async def load() -> dict[str, Any]:
            page = await desk.page(tenant=visit.tenant, status=status, after=cursor)
            return {"letters": page.letters, "next": page.next}

        return await visit.show("letters/list.html", load, title="Letters", status=status)

    @pages.post("/ui/letters/{id}/send")
    async def send_letter(visit: Operator, id: UUID) -> Response:
        await desk.send(id, tenant=visit.tenant)
        return visit.go(f"/ui/letters/{id}", done="The letter is on its way.")

Templates are named `<name of the Pages>/<file>`: "letters/list.html" is `letters/templates/list.html`. Everything in
the package's folder goes into the wheel.

Who may see a page
------------------
`Reader`, `Submitter`, `Operator` and `Admin` (`batchwright.web.visit`) work like the dependencies of the API, but use
the session cookie: visitors without a session are sent to the sign-in page. Each provides a `Visit`. A POST needs the
CSRF token, which these dependencies check; `{{ csrf() }}` writes it into a form, and scripts send it as
`X-CSRF-Token`. With that header the body is not read before your view reads it (`visit.request.stream()`), so that
large uploads can be streamed.

- `visit.tenant`: whose objects are shown; None means all (`?tenant=*`, for admins). `visit.caller.own_tenant` raises an
  error with its remedy where one tenant is needed.
- `visit.may("operate")`: whether the key has that scope. In templates `may("operate")`. Hide what is not allowed.
- `await visit.once()`: an idempotency key for what a POST creates. `csrf()` writes a second field, `once`, which is new
  on every page: without a script a double click sends the same form twice, and both requests have the same key. Verbs
  that move an existing object need none: its state allows the move once.
- `await visit.form()`: the fields of a POST. `visit.services` and `service(visit.request, Kind)`: as in routes.
- `visit.go(path, done=…)`: POST, redirect, GET; the next page shows the sentence once, at the top.
- `visit.draw(template, status=400, **context)`: a page that is neither shared nor live, such as a form with problems.
- `visit.show(template, load, title=…, **context)`: a live page.
- Raise the errors of `batchwright.errors`; the toolkit turns them into a page with the message and its remedy.
  `NotFound` is a 404; use it for objects of other tenants, too.

Live pages
----------
`show` calls `load` at most once a second for all viewers of the same address in the same tenant. So **`load` must
depend on nothing but the tenant and the address**; if it depends on anything else, such as a scope, name that in
`vary=`. Its result must be comparable by `==` (dataclasses, dicts): a page is rendered again only if the result
changed. Pass values that do not change (`title`, the values of filters) as other arguments of `show`.

In a template each block whose name begins with `live_` is a region that updates by itself. It must be the whole content
of an element with that id:

    {% extends "page.html" %}
    {% block content %}
    <section id="live_letters">{% block live_letters %} … {{ letters }} … {% endblock %}</section>
    {% endblock %}

Blocks cannot see a `{% set %}` or `{% import %}` outside of them: set and import inside the block. Do not nest
regions. Updates keep focus, selection, scroll position, open `<details>`, ticked boxes and text being typed; rows of
lists need `id` or `data-key`, so that a row stays the same element. For a region that never updates, use a name
without `live_`.

On the overview
---------------
A part adds to the overview with `Panel(title, template, load, order=…, href=…)` in `Pages(…, panels=[…])`. Items that
need a person's attention come from `Part.attention`.

Uploads
-------
A form with a large file uses `Uploader` instead of `Submitter`: it checks the session but not the token, so that
nothing is read before your view reads the body. The view calls `visit.check_token(value)` with the field `csrf`, which
must come before the file in the form. See `batchwright.files.pages`.

Links and addresses
-------------------
`url("/ui/letters", status="sent")` builds an address and keeps the chosen tenant; `here(cursor=None, status="sent")`
is the current address with changes (None removes). Use them for every link and form action. `find(id)` is the page of
whatever has this id, by the `Finder` of its part, or None.

What templates can use
----------------------
Filters: `number` (1,234,567), `compact` (1.2M), `percent`, `bytes`, `duration` (seconds → 2 h 5 min), `money`, `json`
(indented), `clip(80)`, `short` (an id), `ago` (a moment: relative, with the exact one on hover), `clock` (a moment:
exact), `since` (how long something has been running).

Macros, as `ui.…` (see `templates/macros.html`): `ui.status("FAILED")`, `ui.id(id, href)`, `ui.bar(done, total,
failed)`, `ui.empty(title, text, href, label)`, `ui.pager(next, here)`, `ui.button(label, action, csrf(), …)`,
`ui.stat(label, value, note)`, `ui.facts([(name, value)])`, `ui.notice(kind, title, text)`, `ui.code(text)`,
`ui.tabs(items, label)`, `ui.field(name, label, value, help, problem)`.

Charts are SVG, created on the server by `batchwright.web.charts`: `line_chart`, `bars`, `spark`, `graph`. These
functions return `Markup`; call them in `load`, or as `charts.line_chart(…)` in a template. Colours come from classes
(`series-1` … `series-6`), so that both colour schemes work. Do not use `style=` attributes or inline scripts: the
Content-Security-Policy forbids both.

CSS classes are listed at the top of `static/app.css`. Keys: `j` and `k` move along rows of `<table class="rows">`,
Enter opens the first link of a row, `/` goes to the search field, `?` shows help.
"""
