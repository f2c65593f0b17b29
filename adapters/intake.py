"""From the files of an upload to a directory that can be published: everything is checked against the base model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from adapters import extras
from adapters.base_weights import BaseWeights
from adapters.canonical import CanonicalForm
from adapters.disk import StoreFiles
from adapters.errors import Malformed
from adapters.layout import BaseLayout
from adapters.paths import TENSOR_FILE, layout_fingerprint
from adapters.records import Manifest
from adapters.row_plan import RowPlan
from adapters.upload import Staging
from adapters.validate import check_headers, module_reports


class Intake:
    """What adapters of one base model are checked against; see `adapters.store.AdapterStore` for the arguments."""

    def __init__(
        self,
        layout: BaseLayout,
        base_dir: Path | None,
        row_plan: RowPlan | None,
        check_template: Callable[[str], None] | None,
        base_token_id: Callable[[str], int | None] | None,
    ) -> None:
        self.fingerprint = layout_fingerprint(layout)
        self.row_plan = row_plan
        self._layout = layout
        self._base = BaseWeights(base_dir) if base_dir is not None else None
        self._check_template = check_template
        self._base_token_id = base_token_id

    def prepare(self, staging: Staging) -> tuple[Manifest, Path]:
        """Check a complete upload and write the directory to publish; returns it with its manifest."""
        staging.unpack_archive()
        config, tensors = staging.require()
        tokenizer_config = staging.read("tokenizer_config")
        vocab_size = next((p.in_features for p in self._layout.projections if p.kind == "embedding"), None)
        extras.check_vocabulary(
            staging.read("added_tokens"), tokenizer_config, staging.read("tokenizer"), vocab_size, self._base_token_id
        )
        template = extras.chat_template(staging.read("template"), tokenizer_config)
        self._refuse_template(template)
        template_bytes = None if template is None else template.encode()
        binding = check_headers(config, tensors, self._layout, self.row_plan, self._base)
        modules = module_reports(binding)
        ready = staging.directory / "ready"
        ready.mkdir()
        form = CanonicalForm(binding)
        if form.is_that_of(tensors):
            tensors.rename(ready / TENSOR_FILE)
        else:
            staging.reserve(form.num_bytes)
            form.write(tensors, ready / TENSOR_FILE)
        digest, warnings = form.digest(ready / TENSOR_FILE, template_bytes)
        ignored = [f"The {what} is not needed and was left out." for what in staging.ignored]
        manifest = Manifest(
            digest=digest,
            layout=self.fingerprint,
            rank=max(report.rank for report in modules),
            num_bytes=sum(report.num_bytes for report in modules),
            rows=binding.rows,
            modules=modules,
            notes=(*warnings, *binding.notes, *ignored),
            has_chat_template=template is not None,
            invocation=binding.invocation,
        )
        StoreFiles.complete(ready, config, template_bytes, manifest)
        return manifest, ready

    def _refuse_template(self, template: str | None) -> None:
        if template is None or self._check_template is None:
            return
        try:
            self._check_template(template)
        except ValueError as error:
            raise Malformed(str(error)) from error
