"""Trains models that do not fit on one GPU. This program extends train_gpt2.py.

  torchrun --nproc_per_node=8 train_large.py --preset gpt3-6.7b
  torchrun --nproc_per_node=8 train_large.py --preset gpt3-13b --tp 2
  torchrun --nproc_per_node=8 train_large.py --preset gpt3-13b --pp 2

Three methods split the model over the processes. FSDP is always on:

  FSDP    Each process keeps a shard of each tensor, and all-gathers the weights
          of one block at a time: ZeRO-3 (Rajbhandari et al. 2020,
          arXiv:1910.02054).
  --tp N  Tensor parallelism: N processes split the heads, the width of the MLP
          and the vocabulary (Shoeybi et al. 2019, "Megatron-LM",
          arXiv:1909.08053).
  --pp N  Pipeline parallelism: each of N processes holds some of the blocks.
          The schedule of the micro-batches is 1F1B (Narayanan et al. 2021,
          arXiv:2104.04473, section 2.2). FSDP then all-gathers all blocks of a
          process once per step.

--tp and --pp can be combined. The N processes of --tp read the same
sequences, and so do the N processes of --pp. FSDP shards over the processes
that read different sequences: with 8 processes and --tp 2, over 4.

All other flags work as in train_gpt2.py, whose --help also describes the
presets and the files that a run writes. The order of the data, the losses
(except for rounding) and the checkpoints are the same, too: each of the two
programs can resume a run of the other.
"""

import contextlib
import os
from dataclasses import dataclass

from plaingpt.check_loss import check_loss
from plaingpt.checkpoint import make_whole_gpt
from plaingpt.errors import UserError, run_program
from plaingpt.flags import flag, parse_flags, pick
from plaingpt.large import gradients, parts, pipeline
from plaingpt.large.check_split import make_small_gpt
from plaingpt.large.muon import ShardedMuon
from plaingpt.large.process import SplitProcess
from plaingpt.large.split import split_model
from plaingpt.machine import read_ranks
from plaingpt.memory import keep_freed_memory
from plaingpt.order import hash_numbers
from plaingpt.process import check_equal
from plaingpt.terminal import print0

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

import train_gpt2
from model import GPT, GPTConfig
from train_gpt2 import TrainConfig, Training


@dataclass
class LargeConfig(TrainConfig):
    tp: int = flag(1, "number of tensor-parallel processes; must divide n_head", above=0)
    pp: int = flag(1, "number of pipeline stages; at most n_layer", above=0)

    @property
    def min_micro_batches(self):
        return self.pp  # PyTorch's 1F1B schedule needs at least one micro-batch per stage


def main(argv=None):
    flags = parse_flags(__doc__, GPTConfig, LargeConfig, argv=argv)
    training_class = choose_training(pick(LargeConfig, flags))
    return train_gpt2.main(argv, training_class, LargeConfig)  # parses the flags once more


def choose_training(config):
    """Returns the class that trains a model with this LargeConfig."""
    return PipelineTraining if config.pp > 1 else ShardedTraining


class ShardedTraining(Training):
    """Trains a model that FSDP and tensor parallelism split over processes.

    The parameters are DTensors: each process holds a part of each tensor.
    """

    muon_class = ShardedMuon

    @staticmethod
    def setup(config):
        """Prepares PyTorch and the processes. Returns a SplitProcess."""
        n_parts = config.tp * config.pp
        rank, _, world_size = read_ranks()
        if world_size == 1 or world_size % n_parts:
            raise UserError(
                f"train_large.py --tp {config.tp} --pp {config.pp}: needs a multiple of "
                f"{max(2, n_parts)} processes, but there {'is' if world_size == 1 else 'are'} "
                f"{world_size}; use torchrun --nproc_per_node={max(2, n_parts)}, or train_gpt2.py"
            )
        # Without this setting, NCCL warns about the messages between pipeline stages.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        process = Training.setup(config)
        # With this limit, glibc again returns freed blocks of 128 KiB or more to the operating
        # system. FSDP often frees whole tensors. If glibc kept the freed memory, it would fragment.
        keep_freed_memory(2**17)
        n_shares = world_size // n_parts
        print0(
            f"{world_size} processes: FSDP shards over {n_shares}; --tp {config.tp}; "
            f"--pp {config.pp}"
        )
        # In the mesh of plaingpt/large/split.py, tp varies fastest, and pp varies slowest.
        share = rank // config.tp % n_shares
        return SplitProcess(
            share, n_shares, process.device, process.dtype, process.stop, n_parts=n_parts
        )

    def __init__(self, gpt_config, config, process, weights=None):
        super().__init__(gpt_config, config, process, weights)
        if process.dtype == torch.float16:
            # If one process finds an overflow in its gradients, all processes lower their scale.
            self.scaler = ShardedGradScaler(process.device.type)

    def build(self, weights):
        return split_model(GPT, self.gpt_config, weights, self.config, self.process)

    def wrap(self):
        return self.raw_model, self.raw_model.hidden  # split_model has compiled each block

    def fit_batch_size(self, T):
        """Does not search for a batch_size.

        In such a search, if one process ran out of memory, the other processes would wait forever.
        """

    def sync_gradients(self, is_on):
        self.raw_model.set_requires_gradient_sync(is_on)  # a method of FSDP

    def clip(self, max_norm):
        parameters = [p for p in self.raw_model.parameters() if p.grad is not None]
        norm = self.norm(parameters)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def norm(self, parameters):
        """Returns the global gradient norm. parameters: the parameters of this process."""
        return gradients.norm_of(parameters)

    def state_dict(self):
        state = super().state_dict()
        if self.config.tp > 1 and self.keeps_state():
            parts.restore_qkv(state, self.config.tp)
        return state

    def copy_to_cpu(self, tensor):
        """Returns the whole tensor on the CPU, or None on a process that keeps no tensors."""
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        return tensor.cpu() if self.keeps_state() else None

    def keeps_state(self):
        """Returns whether this process keeps the state of its stage for a checkpoint.

        Only the first process of each stage does.
        """
        return dist.get_rank() % (self.process.n_processes // self.config.pp) == 0

    def own_part(self, optimizer, saved):
        return parts.slice_state(optimizer, saved)


class PipelineTraining(ShardedTraining):
    """Trains a model whose blocks are split over stages of a pipeline. raw_model is a Pipeline."""

    def __init__(self, gpt_config, config, process, weights=None):
        super().__init__(gpt_config, config, process, weights)
        kinds = [(type(each).__name__, len(each.param_groups)) for each in self.optimizers]
        check_equal(
            kinds,
            "--pp: configure_optimizers must return the same optimizers with the same number of "
            "groups on each stage; a group may be empty",
        )

    def build(self, weights):
        # No stage contains all parameters, so each process also keeps the whole GPT, on the meta
        # device.
        self.meta_gpt = make_whole_gpt(GPT, self.gpt_config)
        return super().build(weights)

    def count_parameters(self):
        return sum(p.numel() for p in self.meta_gpt.parameters())

    def flops_per_token(self):
        return self.meta_gpt.flops_per_token()

    def accumulate(self, micro_batches):
        """Runs PyTorch's schedule, in which each stage processes a different micro-batch at a time.

        FSDP averages the gradients in the last backward pass, and keeps the weights of the stage
        unsharded until then.
        """
        # train_gpt2.main has set the same seed on all stages. The next line sets a different seed
        # on each stage, because each stage draws its own dropout masks.
        torch.manual_seed(hash_numbers(torch.initial_seed(), self.raw_model.index))
        weights = self.loss_weights(micro_batches)
        metrics = self.raw_model(micro_batches, weights, self.scaler)
        gradients.sum_tied_gradients(self.raw_model)
        return metrics

    def norm(self, parameters):
        return gradients.norm_of_pipeline(self.raw_model, parameters)

    def check_loss(self, loader):
        """Checks a small GPT, because no stage of the real GPT contains both embedding and head."""
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            gpt = make_small_gpt(GPT, self.gpt_config, "--pp")
        idx = torch.arange(gpt.config.block_size)[None]  # (1, T)
        check_loss(gpt, idx, contextlib.nullcontext())

    def state_dict(self):
        stages = []  # on rank 0, the states of all stages
        for stage in range(self.raw_model.n_stages):
            own = super().state_dict() if stage == self.raw_model.index else None
            stages.append(pipeline.send_to_rank0(stage, own, self.raw_model))
        return parts.join_stages(stages, self.meta_gpt) if self.process.is_main else None

    def parameter_names(self):
        stages = self.raw_model.gather_stages(super().parameter_names())
        names = []
        for groups in zip(*stages):  # the groups of one optimizer, on each stage
            names.append([parts.join_names(group, self.meta_gpt) for group in zip(*groups)])
        return names

    def own_part(self, optimizer, saved):
        return super().own_part(optimizer, parts.select_parameters(saved, optimizer))


if __name__ == "__main__":
    run_program(main)
