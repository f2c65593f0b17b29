"""Prometheus' text format, as `prometheus_client.generate_latest` writes it, in less time.

Most of that goes to names and labels, which are the same at every scrape: their text is made once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

# Texts. A server has a thousand; those of adapters that are not shown any more stay until then.
_MOST_KEPT = 8192


class Exposition:
    """Any thread. Of metrics without timestamps and `_created` series."""

    def __init__(self) -> None:
        self._comments: dict[tuple[str, str, str], str] = {}  # of a family, by name, type and documentation
        self._series: dict[tuple[str, ...], str] = {}  # what stands before a sample, by its name and labels

    def write(self, families: Iterable[Metric]) -> bytes:
        """All of them, in their order."""
        if len(self._series) > _MOST_KEPT:
            self._series = {}
        known, lines = self._series, []
        for family in families:
            lines.append(self._comments_of(family))
            for sample in family.samples:
                key = (sample.name, *sample.labels, *sample.labels.values())
                series = known.get(key)
                if series is None:
                    alone = _lines(family, Sample(sample.name, sample.labels, 0.0))
                    series = known[key] = alone.splitlines()[-1].rpartition(" ")[0]
                lines.append(f"{series} {floatToGoString(sample.value)}\n")
        return "".join(lines).encode()

    def _comments_of(self, family: Metric) -> str:
        key = family.name, family.type, family.documentation
        comments = self._comments.get(key)
        if comments is None:
            comments = self._comments[key] = _lines(family)
        return comments


def _lines(family: Metric, *samples: Sample) -> str:
    """As the library writes it, of these samples alone."""
    copy = Metric(family.name, family.documentation, family.type)
    copy.samples = list(samples)
    return generate_latest(_Families(copy)).decode()


class _Families(CollectorRegistry):
    """What `generate_latest` asks for families."""

    def __init__(self, *families: Metric) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)
