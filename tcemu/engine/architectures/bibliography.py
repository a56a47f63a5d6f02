"""The publications that evidence and recipes name, as rows, and their BibTeX entries."""

from __future__ import annotations

from typing import NamedTuple


class Publication(NamedTuple):
    """A publication, a specification or a program that a text of this package names."""

    key: str  # key of the BibTeX entry
    mentions: tuple[str, ...]  # words by which texts name it
    kind: str  # type of the BibTeX entry
    author: str
    title: str
    year: str = ""
    arxiv: str = ""  # arXiv number
    more: tuple[tuple[str, str], ...] = ()  # other fields of the entry

    @property
    def entry(self) -> str:
        """The BibTeX entry."""
        eprint = (("eprint", self.arxiv), ("archivePrefix", "arXiv"), ("url", f"https://arxiv.org/abs/{self.arxiv}")) if self.arxiv else ()
        fields = (("author", self.author), ("title", f"{{{self.title}}}"), ("year", self.year), *eprint, *self.more)
        lines = [f"  {name:13} = {{{value}}}," for name, value in fields if value]
        return "\n".join([f"@{self.kind}{{{self.key},", *lines, "}"])


# The release that CITATION.cff describes. Its date is that of the version below
THIS_PACKAGE = Publication(
    "tcemu", ("tests/golden", "tcemu"), "software", "{The tcemu developers}",
    "tcemu: NVIDIA's tensor-core instructions, bit for bit, in JAX", "2026",
    more=(("version", "1.0.0rc1"), ("date", "2026-11-23"), ("note", "Apache-2.0")),
)  # fmt: skip


def _arxiv(key: str, number: str, author: str, title: str, *more: tuple[str, str]) -> Publication:
    return Publication(key, (number,), "misc", author, title, f"20{number[:2]}", number, more)


def _program(key: str, mention: str, author: str, title: str, url: str) -> Publication:
    return Publication(key, (mention,), "software", author, title, more=(("url", url),))


_PTX = (("url", "https://docs.nvidia.com/cuda/parallel-thread-execution/"),)
_OCP = "https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf"
_NVIDIA = "https://github.com/NVIDIA"

# Sources: the publications' own pages; arXiv's listing for those with a number
PUBLICATIONS = (
    THIS_PACKAGE,
    _arxiv("xie2025mmasim", "2511.10909", "Xie, Peichen and others",
           "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores", ("note", "version 2 and its code, mmasim 2.1.1")),
    _arxiv("khattak2025models", "2512.07004", "Khattak, Faizan A. and Mikaitis, Mantas", "Accurate Models of NVIDIA Tensor Cores",
           ("doi", "10.1145/3830409")),
    Publication("reuter", ("D. Reuter",), "misc", "Reuter, D.", "Notes on the arithmetic of NVIDIA's tensor cores",
                more=(("note", "public notes; words not public"),)),
    _program("pantheonsim", "pantheongpu/pantheonsim", "{PantheonGPU}", "PantheonSim", "https://github.com/pantheongpu/pantheonsim"),
    _program("sftensor-tcgen05", "sf-tensor/tcgen05", "{sf-tensor}", "tcgen05", "https://github.com/sf-tensor/tcgen05"),
    Publication("nvidia-ptx", ("PTX ISA",), "manual", "{NVIDIA}", "Parallel Thread Execution ISA", more=_PTX),
    Publication("nvidia-ptxas", ("ptxas",), "manual", "{NVIDIA}", "CUDA Toolkit: ptxas",
                more=(("note", "machine code of the named versions"),)),
    _arxiv("micikevicius2017mixed", "1710.03740", "Micikevicius, Paulius and others", "Mixed Precision Training"),
    _arxiv("kalamkar2019bfloat16", "1905.12322", "Kalamkar, Dhiraj and others", "A Study of BFLOAT16 for Deep Learning Training"),
    Publication("nvidia-a100", ("NVIDIA A100 whitepaper",), "techreport", "{NVIDIA}", "NVIDIA A100 Tensor Core GPU Architecture", "2020",
                more=(("institution", "NVIDIA"),)),
    _arxiv("micikevicius2022fp8", "2209.05433", "Micikevicius, Paulius and others", "FP8 Formats for Deep Learning"),
    _arxiv("deepseek2024v3", "2412.19437", "{DeepSeek-AI}", "DeepSeek-V3 Technical Report"),
    _arxiv("mishra2025mxfp8", "2506.08027", "Mishra, Asit and Stosic, Dusan and Layton, Simon and Micikevicius, Paulius",
           "Recipes for Pre-training LLMs with MXFP8"),
    _arxiv("nvidia2025nvfp4", "2509.25149", "{NVIDIA}", "Pretraining Large Language Models with NVFP4"),
    _arxiv("mishra2021sparse", "2104.08378", "Mishra, Asit and others", "Accelerating Sparse Deep Neural Networks"),
    _arxiv("zhou2021nm", "2102.04010", "Zhou, Aojun and others",
           "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch"),
    _arxiv("frantar2024marlin", "2408.11743", "Frantar, Elias and others",
           "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large Language Models"),
    Publication("ocp-mx", ("OCP MX 1.0",), "techreport", "{Open Compute Project}", "OCP Microscaling Formats (MX) Specification", "2023",
                more=(("number", "Version 1.0"), ("institution", "Open Compute Project"), ("url", _OCP))),
    _program("transformerengine", "TransformerEngine", "{NVIDIA}", "Transformer Engine", f"{_NVIDIA}/TransformerEngine"),
    _program("cublaslt", "CUBLASLT", "{NVIDIA}", "cuBLAS: the cuBLASLt API", "https://docs.nvidia.com/cuda/cublas/"),
    _program("torchao", "torchao", "{The torchao developers}", "torchao", "https://github.com/pytorch/ao"),
    _program("deepgemm", "DeepGEMM", "{DeepSeek-AI}", "DeepGEMM", "https://github.com/deepseek-ai/DeepGEMM"),
)  # fmt: skip


def list_publications(*texts: str) -> tuple[Publication, ...]:
    """Return the publications that texts name, in the order of the table."""
    return tuple(row for row in PUBLICATIONS if any(mention in text for text in texts for mention in row.mentions))


def make_bibtex(*texts: str) -> str:
    """Return BibTeX entries of this package and of the publications that texts name.

    Args:
        texts: Texts such as `Evidence.source` and `Recipe.source`.
    """
    return "\n\n".join(row.entry for row in dict.fromkeys((THIS_PACKAGE, *list_publications(*texts))))
