"""Runs on the stand-in for CUDA without values: what the host must read, in place of what no kernel has computed.

vLLM's second model runner counts sampled tokens on the device. Where no kernel runs, no token would be counted, and no
request would end.
"""

import ctypes


def _poke(tensor, values):
    """Write values of the host to a contiguous tensor of the device, in its own dtype."""
    import torch

    host = torch.as_tensor(values).to(tensor.dtype).reshape(tensor.shape).contiguous()
    assert tensor.is_contiguous()
    pointers = (ctypes.c_void_p(each.data_ptr()) for each in (tensor, host))
    ctypes.CDLL(None).standin_poke(*pointers, ctypes.c_size_t(host.nbytes))


def of_fingerprints(module):
    """After `nemo_rl.refit.fingerprint`: all weights on a device are alike. What a trace counts of them stays."""
    import torch

    fingerprints = module.fingerprints

    def alike(parts):
        found = fingerprints(parts)
        if not found.is_cpu:
            _poke(found, torch.zeros(found.shape))
        return found

    module.fingerprints = alike


def of_sampler(module):
    """After each call of `vllm.v1.worker.gpu.sample.sampler.Sampler`: one token for each request past its prompt.

    Which token depends on its position and on the request's row, so that no two requests are alike.
    """
    import torch

    call = module.Sampler.__call__

    def sampled(self, logits, batch):
        out = call(self, logits, batch)
        rows = batch.idx_mapping_np
        count = len(rows)
        ends = batch.seq_lens_cpu_upper_bound[:count]
        has_token = ends >= torch.as_tensor(self.req_states.prefill_len.np[rows])
        _poke(out.num_sampled, torch.nn.functional.pad(has_token.int(), (0, len(out.num_sampled) - count)))
        tokens = (ends.long() * 7919 + torch.as_tensor(rows).long() * 31) % logits.shape[-1]
        _poke(out.sampled_token_ids, tokens)
        if (logprobs := out.logprobs_tensors) is not None:
            ids = logprobs.logprob_token_ids
            _poke(ids, tokens[:, None].expand(count, ids.shape[1]))
            _poke(logprobs.logprobs, torch.zeros(ids.shape))
            _poke(logprobs.selected_token_ranks, torch.zeros(count))
        return out

    module.Sampler.__call__ = sampled
