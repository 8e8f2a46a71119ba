"""A page taken apart."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """Its words, its scripts, the figures these draw, and its content security policy."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.scripts: list[str] = []
        self.policies: list[str] = []
        self.words = ""
        self._within = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._within = tag
        said = dict(attrs)
        if said.get("http-equiv") == "Content-Security-Policy":
            self.policies.append(said["content"] or "")
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        if self._within == "script":
            self.scripts.append(data)
        elif self._within != "style":
            self.words += data

    @property
    def policy(self) -> dict[str, list[str]]:
        """The sources that its one policy allows, by directive."""
        (policy,) = self.policies
        rules = [rule.split() for rule in policy.split(";")]
        return {directive: sources for directive, *sources in rules}

    @property
    def figures(self) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = json.loads(self.scripts[0])
        return found
