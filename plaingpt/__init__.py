"""The files that the programs use. Each line names a file, and the question that it answers.

A file outside the subpackages scoring, large, lab and look imports no file of these subpackages.

Settings and messages
  settings.py        which settings a run uses: presets, defaults, checks of the flags
  flags.py           how the fields of a dataclass become command-line flags
  errors.py          which errors become one line, and which keep their traceback
  terminal.py        what rank 0 prints, and how a progress bar is shown

Data: from documents to training sequences
  documents.py       how documents and records are read from files and from the Hugging Face Hub
  tokenizer.py       how a text becomes token ids, and how token ids become a text
  gpt2.tiktoken      which tokens GPT-2's vocabulary contains
  shards.py          how files of token ids are found and read
  ready_shards.py    how fineweb.py --ready downloads shards
  data.py            which data sets --data names, with which shares and which tokenizer
  pairs.py           how prompt/response pairs become sequences
  order.py           in which order a run reads its sequences

The model and its optimizers
  loss.py            how the cross-entropy is computed without storing all logits
  check_loss.py      whether GPT.loss of an edited model.py is the cross-entropy of GPT.logits
  sampling.py        how tokens are generated: KV cache, temperature, top-k, top-p
  muon.py            how the optimizer Muon updates matrices
  optimizers.py      how the state of the optimizers is restored

A process and its device
  process.py         how processes join a group and exchange values
  machine.py         which cores and GPUs a process may use, and the rank of the process
  device.py          which device and dtype a process uses, and whether to compile the model
  memory.py          how allocating memory becomes faster, and what to do if memory runs out
  batch_size.py      whether the batch sizes are valid, and which micro-batch fits into memory
  signals.py         how a run stops after a signal or a time limit

A run and its files
  log.py             what a run writes and prints
  trackers.py        what TensorBoard and Weights & Biases receive
  files.py           how files are written, locked, checked and read back
  source_code.py     which commit and which changes the code contains, and a hash of the code

Weights
  checkpoint.py      how checkpoints are written, found, checked and read
  pretrained.py      how weights are loaded and exported, including weights in Hugging Face format

scoring/: benchmarks
  scoring/benchmark.py       what a benchmark consists of, and how metrics follow from scores
  scoring/score.py           how a model scores the endings of an example
  scoring/program.py         what the program of a benchmark does

large/: models that are split over processes, for train_large.py
  large/split.py             how a model is split
  large/tensor_parallel.py   how --tp splits each layer
  large/pipeline.py          how --pp runs the blocks in stages
  large/parts.py             how the parts are initialized, and joined for a checkpoint
  large/process.py           which processes read the same sequences
  large/loss.py              how --tp computes the cross-entropy
  large/gradients.py         how the gradient norm of a split model is computed
  large/muon.py              how Muon updates split matrices
  large/check_split.py       whether splitting an edited model.py changes the results

lab/: experiments that compare two programs, for experiment.py
  lab/copies.py              how both programs are copied
  lab/runs.py                how the runs of both programs are started and scored
  lab/verdict.py             which verdict follows from the losses

look/: a page that shows what a model does with a text, for look.py
  look/record.py             how losses, attention weights and block outputs are recorded
  look/page.py               how the records become one HTML file
  look/live.py               which models the page can run, and what the page stores of a model
  look/page.html             which elements the page has
  look/page.css              how these elements look
  look/page.js               how the page draws the records
  look/gpt.js                how the page computes GPT-2
  look/live.js               how the page runs the model on a new text, and samples tokens
  look/play.js               how the reader types, switches parts off, and solves riddles
"""

# numpy is imported before torch, because torch ignores Ctrl-C while importing numpy itself.
import numpy  # noqa: F401
