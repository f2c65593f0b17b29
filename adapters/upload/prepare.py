"""Preparation of an upload: its files are checked against the base model and made a directory that can be published;
and the way back, an archive that can be uploaded."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from pathlib import Path

from adapters.errors import AdapterError, Malformed
from adapters.files.disk import StoreFiles
from adapters.files.manifest import Manifest
from adapters.files.paths import (
    CONFIG_FILE,
    DEFAULT_TEMPLATE,
    MODEL_CONFIG_FILE,
    TENSOR_FILE,
    layout_fingerprint,
)
from adapters.layout import BaseLayout
from adapters.peft.base_weights import BaseWeights
from adapters.peft.canonical_file import CanonicalForm
from adapters.row_plan import RowPlan
from adapters.text.side_files import TEXT_ROLES
from adapters.text.tokenizer_files import AdapterText, read_text
from adapters.text.vocabulary import BaseText
from adapters.upload.archives import pack
from adapters.upload.peft_form import PeftForm, text_files
from adapters.upload.staging import Followed, Staging
from adapters.upload.validate import bind_header, check_binding, check_spare_rows, module_reports, with_split_blocks

# A larger header is read once, when the upload is whole.
_MAX_FOLLOWED_HEADER_BYTES = 1 << 20


class Intake:
    """The checks of adapters for one base model; see `adapters.store.store.AdapterStore` for the arguments."""

    def __init__(
        self,
        layout: BaseLayout,
        base_dir: Path | None,
        row_plan: RowPlan | None,
        check_template: Callable[[str], None] | None,
        base_text: BaseText | None,
    ) -> None:
        self.fingerprint = layout_fingerprint(layout)
        self.row_plan = row_plan
        self._layout = layout
        self._base = BaseWeights(base_dir) if base_dir is not None else None
        self._check_template = check_template
        self._base_text = base_text

    def follow(
        self, staging: Staging, tensors: Path, flush: Callable[[], None]
    ) -> Generator[None, bytes | memoryview, None]:
        """Bind and digest an upload's tensors as they come: is sent each piece of their file once it is written, which
        others can read after `flush`. Faults, and whatever cannot be known yet, are left to `prepare`."""
        with suppress(AdapterError, OSError):
            start, end = bytearray(), 8
            while len(start) < end:
                start += yield
                if len(start) >= 8:
                    end = 8 + int.from_bytes(start[:8], "little")
                if end > _MAX_FOLLOWED_HEADER_BYTES:
                    return
            if (config := staging.read("config")) is None:
                return
            flush()
            binding = bind_header(config, tensors, self._layout, is_growing=True)
            binding = binding.with_head_of(staging.read("model_config"), MODEL_CONFIG_FILE)
            form = CanonicalForm(binding)
            if form.is_that_of(tensors):
                scan = form.scan(form.described(self._read_text(staging)))
                scan.take(memoryview(start)[end:])
                while not scan.is_complete:
                    scan.take((yield))
                staging.followed = Followed(binding, scan, form.num_bytes)

    def prepare(self, staging: Staging) -> tuple[Manifest, Path]:
        """Check a complete upload and write the directory to publish; returns it with its manifest."""
        staging.unpack_archive()
        config, tensors = staging.require()
        text = self._read_text(staging)
        followed = staging.followed
        if followed is not None and followed.num_bytes != tensors.stat().st_size:
            followed = None
        binding = followed.binding if followed is not None else bind_header(config, tensors, self._layout)
        binding = with_split_blocks(binding.with_head_of(staging.read("model_config"), MODEL_CONFIG_FILE), tensors)
        if staging.expert_b_order is not None and all(bound.num_experts == 1 for bound in binding.slices):
            raise Malformed("The adapter has no experts; leave expert_b_order out.")
        notes = check_spare_rows(binding, text.num_padding_tokens)
        binding = check_binding(binding, tensors, self.row_plan, self._base)
        if binding.base_copies and self._base is not None and not self._base.can_compare:
            notes.append("The copies were not compared: the base's directory has no model.safetensors.")
        if binding.head is None and "model_config" in staging.files:
            notes.append(f"The file {MODEL_CONFIG_FILE} is not needed and was left out.")
        modules = module_reports(binding)
        ready = staging.directory / "ready"
        ready.mkdir()
        form = CanonicalForm(binding)
        target = ready / TENSOR_FILE
        scan = form.scan(form.described(text))
        if form.is_that_of(tensors) and tensors.is_symlink() == staging.is_ephemeral:
            tensors.rename(target)
            if followed is not None and followed.scan.described == scan.described:
                scan = followed.scan
        else:
            staging.reserve_tensors(form.num_bytes)
            staging.place(target)
            form.write(tensors, target)
        digest, warnings = form.digest(target, scan)
        manifest = Manifest(
            digest=digest,
            layout=self.fingerprint,
            rank=max(report.rank for report in modules),
            num_bytes=sum(report.num_bytes for report in modules),
            rows=binding.rows,
            modules=modules,
            notes=(*warnings, *binding.notes, *notes, *text.notes, *staging.left_out),
            has_chat_template=bool(text.templates),
            invocation=binding.invocation,
            special_tokens=text.special_tokens,
            eos_token_ids=text.eos_token_ids,
            labels=() if binding.head is None else binding.head.labels,
            problem_type="" if binding.head is None else binding.head.problem_type,
            classifier_from_token=binding.classifier_from_token,
        )
        StoreFiles.complete(ready, config, text.templates, manifest)
        return manifest, ready

    def archive(
        self, directory: Path, manifest: Manifest, templates: Mapping[str, str], time_seconds: int
    ) -> Generator[bytes, None, None]:
        """A .tar.gz of a PEFT directory that is this adapter when it is uploaded; see `PeftForm` for errors.

        directory  of the store
        """
        form = PeftForm(directory, manifest, self._layout)
        others = text_files(templates, manifest, self._base_text)
        small = [(name, len(data), [data]) for name, data in {CONFIG_FILE: form.config, **others}.items()]
        return pack([*small, (TENSOR_FILE, form.num_bytes, form.tensors())], time_seconds)

    def _read_text(self, staging: Staging) -> AdapterText:
        """The adapter's tokenizer files and templates. Raises as `read_text` does, and Malformed for a refused
        template."""
        files = {role: data for role in TEXT_ROLES if (data := staging.read(role)) is not None}
        named = staging.read_named_templates()
        vocab_size = next((p.in_features for p in self._layout.projections if p.kind == "embedding"), None)
        text = read_text(files, named, self._base_text, vocab_size)
        for name, source in text.templates.items():
            try:
                if self._check_template is not None:
                    self._check_template(source)
            except ValueError as error:
                which = "" if name == DEFAULT_TEMPLATE else f"The template {name!r}: "
                raise Malformed(f"{which}{error}") from error
        return text
