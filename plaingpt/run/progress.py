"""What a run prints: a line for a step or a validation, the time to go, and how it has ended."""

import math
import statistics
from datetime import timedelta

from plaingpt.base.terminal import print0, shorten_line, show_progress
from plaingpt.distributed.hardware import peak_flops


class Progress:
    """Prints the progress of a run. flops_per_token: that of GPT, forward and backward."""

    def __init__(self, config, flops_per_token, process):
        self.config = config
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops(process)
        self.seconds_per_token = []  # of the last ten steps
        self.n_skipped = 0  # steps with a non-finite gradient
        self.n_skipped_in_row = 0
        self.n_rises = 0  # how many times in a row the validation loss has risen
        self.last_val = math.inf

    def show_step(self, step, n_tokens, seconds, figures):
        """Prints every log_every-th step, and those with a non-finite gradient.

        figures: {name: number} of the step, with train (the loss), norm and lr.
        """
        is_skipped = not math.isfinite(figures["norm"])
        if is_skipped:
            self.n_skipped += 1
            self.n_skipped_in_row += 1
        else:
            self.n_skipped_in_row = 0
        self.seconds_per_token = [*self.seconds_per_token[-9:], seconds / n_tokens]
        to_go = timedelta(seconds=round(self.seconds_to_go(step, n_tokens)))
        progress = f"loss {figures['train']:.4f} | {to_go} to go"
        is_last = step == self.config.max_steps - 1
        if step % self.config.log_every == 0 or is_last or is_skipped:
            tok_s = n_tokens / seconds
            flops = tok_s * self.flops_per_token
            parts = [f"step {step:5d}/{self.config.max_steps}", progress]
            if is_skipped:
                parts.append(f"{self.n_skipped} skipped")
            parts.append(f"norm {figures['norm']:.3f}")
            parts.append(f"{tok_s:,.0f} tok/s")
            parts.append(f"lr {figures['lr']:.2e}")
            parts.append(f"{seconds * 1000:.0f} ms")
            parts.append(f"{flops / 1e12:.2f} TFLOP/s")
            if self.peak_flops:
                parts.append(f"mfu {flops / self.peak_flops:.1%}")
            print0(shorten_line(" | ".join(parts)))
        show_progress(step + 1, self.config.max_steps, progress)

    def seconds_to_go(self, step, n_tokens):
        """Returns the seconds that the steps after this one will take. n_tokens: of this step."""
        total = self.config.total_batch_size
        steps_left = self.config.max_steps - step - 1
        # In a ramp, steps have fewer tokens than total_batch_size; the number grows linearly.
        ramp_left = min(steps_left, max(0, self.config.rampup_steps - step - 1))
        tokens_left = total * steps_left - ramp_left * (total - n_tokens) / 2
        return statistics.median(self.seconds_per_token) * tokens_left

    def show_validation(self, step, figures, names, epochs):
        """Prints the losses of a validation.

        figures: {name: number}, from validate in train_gpt2.py. names: of the data sets. epochs:
        how often each was read.
        """
        rest = dict(figures)
        val = rest.pop("val")
        parts = [
            f"step {step}",
            f"val loss {val:.4f}",
            f"perplexity {math.exp(min(val, 99)):,.2f}",
            f"{rest.pop('bpb'):.4f} bits per byte",
        ]
        if len(names) > 1:
            for name, epoch in zip(names, epochs):
                loss = rest.pop(f"val_{name}")
                bits = rest.pop(f"bpb_{name}")
                parts.append(f"{name}: loss {loss:.4f}, {bits:.4f} bits, epoch {epoch:.2f}")
        parts += [f"{name} {value:.4f}" for name, value in rest.items()]  # of an edited program
        print0(" | ".join(parts))
        if val > self.last_val:
            self.n_rises += 1
        else:
            self.n_rises = 0
        self.last_val = val
        if self.n_rises == 3:
            advice = "start again with --keep_best, which keeps the best step"
            if self.config.keep_best:
                advice = f"{self.config.log_dir}/model_best.pt has the best step"
            print0(f"note: the validation loss has risen three times in a row; {advice}")

    def show_end(self, step):
        """Prints how the run has ended."""
        how = "done"
        if step < self.config.max_steps:
            how = f"stopped by a signal or --max_minutes; step {step} is saved, --resume continues"
        skipped = f"{self.n_skipped} steps skipped; " if self.n_skipped else ""
        program = f"python generate.py --checkpoint {self.config.log_dir}"
        print0(f"{how}: {skipped}{program} writes text")
