"""Other people's rotary kernels on the CPU, each where its package can be imported.

They are given what suits them: their own layout of the table, in the dtype they ask for, output buffers where they take
them. What cannot run, or runs wrong, is left out with the reason.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from benchmarks.cases import Case, Inputs
from benchmarks.contenders import Contender, LeftOut


def needed(*names: str) -> list[Any]:
    try:
        return [importlib.import_module(name) for name in names]
    except ImportError as error:
        raise LeftOut(f"not installed: {error}") from error


def require(holds: bool, reason: str) -> None:
    if not holds:
        raise LeftOut(reason)


def merged(x: Tensor) -> Tensor:
    """(B, S, H, D) as (B, S, H * D), new memory."""
    return x.flatten(2).clone()


def onnxruntime_peer(case: Case, x: Inputs) -> Contender:
    """The contributed operator com.microsoft.RotaryEmbedding, a session of two nodes with bound buffers."""
    runtime, _, helper, _ = needed("onnxruntime", "onnx", "onnx.helper", "numpy")
    require(case.dtype != "bf16", "no bfloat16 on the CPU")
    numpy_type, onnx_type = {"fp16": ("float16", 10), "fp32": ("float32", 1)}[case.dtype]
    h, nodes = case.heads, []
    cos, sin = (part.to(x.q.dtype).contiguous() for part in (x.freqs_cis.real, x.freqs_cis.imag))
    values = {"cos": cos, "sin": sin}
    values["positions"] = torch.arange(x.freqs_cis.shape[0]).expand(x.q.shape[:2]).contiguous()
    for name, tensor, heads in (("q", x.q, h.q), ("k", x.k, h.k)):
        values[name], values[f"{name}_out"] = merged(tensor), merged(tensor)
        nodes.append(
            helper.make_node(
                "RotaryEmbedding",
                [name, "positions", "cos", "sin"],
                [f"{name}_out"],
                domain="com.microsoft",
                interleaved=1,
                num_heads=heads,
                rotary_embedding_dim=h.rotary_dim if h.rotary_dim < h.head_dim else 0,
            )
        )
    described = {
        name: helper.make_tensor_value_info(name, 7 if name == "positions" else onnx_type, value.shape)
        for name, value in values.items()
    }
    outputs = [described.pop("q_out"), described.pop("k_out")]
    graph = helper.make_graph(nodes, "rotary", list(described.values()), outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, value in values.items():
        bind = binding.bind_output if name.endswith("_out") else binding.bind_input
        kind = "int64" if name == "positions" else numpy_type
        bind(name, "cpu", 0, kind, tuple(value.shape), value.data_ptr())
    return Contender(
        "onnxruntime",
        "peer",
        "run(binding)",
        {"run": session.run_with_iobinding, "binding": binding, "alive": values},
        result=lambda _: (values["q_out"].view_as(x.q), values["k_out"].view_as(x.k)),
    )


def openvino_peer(case: Case, x: Inputs) -> Contender:
    """The formula on halves as a compiled model; shared input and output buffers."""
    openvino, ops, _ = needed("openvino", "openvino.opset13", "numpy")
    require(
        case.dtype == "fp32", "measured in float32 only: its tensors come through numpy, its CPU kernels widen fp16"
    )
    require(case.heads.rotary_dim == case.heads.head_dim, "no partial rotation here")
    cos, sin = (part.numpy()[None, :, None].copy() for part in (x.freqs_cis.real, x.freqs_cis.imag))
    parameters = [ops.parameter(list(tensor.shape), openvino.Type.f32) for tensor in (x.q, x.k)]
    outputs = []
    for parameter in parameters:
        a, b = ops.split(parameter, 3, 2).outputs()
        real = ops.subtract(ops.multiply(a, cos), ops.multiply(b, sin))
        imag = ops.add(ops.multiply(a, sin), ops.multiply(b, cos))
        outputs.append(ops.concat([real, imag], 3))
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.Core().compile_model(openvino.Model(outputs, parameters), "CPU", settings).create_infer_request()
    found = (torch.empty_like(x.q), torch.empty_like(x.k))
    for i, (tensor, output) in enumerate(zip((x.q, x.k), found, strict=True)):
        request.set_input_tensor(i, openvino.Tensor(tensor.numpy(), shared_memory=True))
        request.set_output_tensor(i, openvino.Tensor(output.numpy(), shared_memory=True))
    return Contender("openvino", "peer", "run()", {"run": request.infer}, pairing="halves", result=lambda _: found)


def jax_peer(case: Case, x: Inputs) -> Contender:
    """The formula on halves in float32, compiled by XLA for this shape; as many threads as it may run on."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax, jnp = needed("jax", "jax.numpy")
    require(case.heads.rotary_dim == case.heads.head_dim, "no partial rotation here")

    def rotate(x: Any, cos: Any, sin: Any) -> Any:
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate((a * cos - b * sin, a * sin + b * cos), -1).astype(x.dtype)

    both = jax.jit(lambda q, k, c, s: (rotate(q, c, s), rotate(k, c, s)))
    cos, sin = (part[:, None].contiguous() for part in (x.freqs_cis.real, x.freqs_cis.imag))
    names = {name: jnp.from_dlpack(value) for name, value in {"q": x.q, "k": x.k, "c": cos, "s": sin}.items()}
    return Contender(
        "jax",
        "peer",
        "wait(f(q, k, c, s))",
        names | {"f": both, "wait": jax.block_until_ready},
        pairing="halves",
        result=lambda value: (from_dlpack(value[0]), from_dlpack(value[1])),
    )


def serving_names(case: Case, x: Inputs) -> dict[str, Any]:
    """The arguments of vLLM's kernel, which SGLang's shares: flat tokens, positions, rows of cos and then sin."""
    cache = torch.cat((x.freqs_cis.real, x.freqs_cis.imag), -1).to(x.q.dtype)
    positions = torch.arange(cache.shape[0]).expand(x.q.shape[:2]).flatten().contiguous()
    q, k = (merged(tensor).flatten(0, 1) for tensor in (x.q, x.k))
    return {"p": positions, "q": q, "k": k, "d": case.heads.head_dim, "cache": cache}


def vllm_peer(case: Case, x: Inputs) -> Contender:
    needed("vllm._C")
    names = serving_names(case, x) | {"f": torch.ops._C.rotary_embedding}
    result = (names["q"].view_as(x.q), names["k"].view_as(x.k))
    return Contender("vLLM", "peer", "f(p, q, k, d, cache, False)", names, in_place=True, result=lambda _: result)


def sglang_peer(case: Case, x: Inputs) -> Contender:
    needed("sgl_kernel")
    require(hasattr(torch.ops.sgl_kernel, "rotary_embedding_cpu"), "sgl_kernel was built without CPU kernels")
    names = serving_names(case, x) | {"f": torch.ops.sgl_kernel.rotary_embedding_cpu}
    return Contender(
        "SGLang",
        "peer",
        "f(p, q, k, d, cache, False)",
        names,
        result=lambda value: (value[0].view_as(x.q), value[1].view_as(x.k)),
    )


PEERS: dict[str, Callable[[Case, Inputs], Contender]] = {
    "onnxruntime": onnxruntime_peer,
    "openvino": openvino_peer,
    "jax": jax_peer,
    "vLLM": vllm_peer,
    "SGLang": sglang_peer,
}
