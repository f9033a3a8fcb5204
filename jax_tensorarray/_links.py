"""The address of the documentation. It equals `site_url` in `mkdocs.yml`."""

#: The address of the pages. Until there is a site, this is a placeholder.
SITE = "https://example.invalid/jax_tensorarray/"

#: Names that never resolve, by RFC 2606. Nobody can open such an address.
_PLACEHOLDER = ".invalid/"

#: The command that prints the section of a message.
COMMAND = "python -m jax_tensorarray.doctor --why"


def message(tag: str) -> str:
    """Return the address of the section of a message."""
    return f"{SITE}reference/messages/#{tag}"


def why(tag: str) -> str:
    """Return the address of the section of a message, if there is a site, and the command that works offline."""
    command = f"{COMMAND} {tag}"
    return command if _PLACEHOLDER in SITE else f"{message(tag)} or {command}"
