// The computations of a live page: runs the GPT of gpt.js on a text of bytes, and samples next tokens.

const ALL_ON = new Set();  // no part of the model is omitted
const TOLERANCE = 1e-4;  // of error / max(1, loss); rounding to float32 causes less than 1e-5

// ---- bytes -------------------------------------------------------------------------------------

const encode = (text) => Array.from(new TextEncoder().encode(text));

function decode(ids) {
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(ids.filter((id) => id < 256)));
}

/** Returns each token as a string. A character of several bytes is in the string of its first byte. */
function splitText(ids) {
  const texts = [];
  while (texts.length < ids.length) {
    const first = ids[texts.length];
    const length = first < 0xc0 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    const text = decode(ids.slice(texts.length, texts.length + length));
    const isCharacter = [...text].length === 1 && text !== "\ufffd";
    texts.push(isCharacter ? text : "\ufffd");
    if (isCharacter) texts.push(...Array(length - 1).fill(""));
  }
  return texts;
}

/** Returns the name of one byte. A byte that is not a whole character looks like <E4>. */
function nameOfByte(id) {
  if (id < 128) return String.fromCharCode(id);
  return id < 256 ? `<${id.toString(16).toUpperCase()}>` : `<${id}>`;
}

// ---- the model ---------------------------------------------------------------------------------

/** The results of a GPT for a text. If a new text begins like the previous one, only the rest is computed. */
class Reading {
  /** off: a Set of the parts that are omitted, as in GPT.hidden. */
  constructor(gpt, off) {
    Object.assign(this, { gpt, off, ids: [] });
    this.caches = gpt.h.map(() => new KVCache(gpt.config));
    // For the embedding and for each block, these lists contain a list with a row per position.
    this.streams = [[], ...gpt.h.map(() => [])];  // rows (C)
    this.logits = [[], ...gpt.h.map(() => [])];  // rows (vocab_size), as if the model ended there
  }

  /** Reads up to block_size ids. One more id may follow; the GPT only predicts this last id. */
  read(ids) {
    const { n_embd, block_size } = this.gpt.config;
    const T = Math.min(ids.length, block_size);
    let start = 0;  // position of the first id that is not in the caches
    while (start < T && start < this.streams[0].length && ids[start] === this.ids[start]) start++;
    for (const rows of [...this.streams, ...this.logits]) rows.length = start;
    for (const cache of this.caches) cache.weights.forEach((rows) => rows.splice(start));
    if (start < T) {
      this.gpt.hidden(ids.slice(start, T), start, this.caches, this.off).forEach((x, i) => {
        const logits = this.gpt.logits(x);  // (T - start, vocab_size)
        this.streams[i].push(...splitRows(x, n_embd));
        this.logits[i].push(...splitRows(logits, logits.length / (T - start)));
      });
    }
    this.ids = ids;
  }

  /** Returns the losses of all ids except the first. logits: as if the model ended after a block. */
  losses(logits = this.logits.at(-1)) {
    return Float32Array.from(this.ids.slice(1), (id, t) => crossEntropy(logits[t], id));
  }

  /** Returns the logits of the next id, (vocab_size), or undefined if the context is full. */
  next() {
    return this.logits.at(-1)[this.ids.length - 1];
  }
}

function splitRows(x, size) {
  return Array.from({ length: x.length / size }, (_, t) => x.subarray(t * size, (t + 1) * size));
}

/** Returns the probabilities of the next id, (vocab_size), as sample() in plaingpt/sampling.py uses them. */
function probabilities(logits, temperature, topK) {
  const order = Array.from(logits.keys()).sort((a, b) => logits[b] - logits[a]);
  if (temperature === 0) return Float32Array.from(logits, (_, id) => Number(id === order[0]));
  const least = logits[order[Math.min(topK || Infinity, logits.length) - 1]];
  return softmax(logits.map((logit) => (logit < least ? -Infinity : logit / temperature)));
}

/** Samples an id from these probabilities. */
function draw(probs) {
  let rest = Math.random() * probs.reduce((a, b) => a + b, 0);
  const id = probs.findIndex((p) => (rest -= p) < 0);
  return id < 0 ? probs.indexOf(Math.max(...probs)) : id;
}

/** Compares the losses of this page with PyTorch's losses. Returns the largest {difference, worst}.
 *
 * worst: the largest difference / max(1, loss). The hidden states are also multiplied by 30, because only
 * large logits reveal a soft-cap. */
function compare(gpt, checks) {
  let [difference, worst] = [0, 0];
  for (const { ids, losses } of checks) {
    const reading = new Reading(gpt, ALL_ON);
    reading.read(ids);
    const rows = reading.streams.at(-1).slice(0, ids.length - 1);
    for (const [factor, expected] of Object.entries(losses)) {
      rows.forEach((row, t) => {
        const x = gpt.ln_f.forward(row).map((value) => value * factor);  // (C)
        const loss = crossEntropy(gpt.lm_head.forward(x), ids[t + 1]);
        const error = Math.abs(loss - expected[t]);
        if (factor === "1") difference = Math.max(difference, error);
        worst = Math.max(worst, error / Math.max(1, expected[t]));
      });
    }
  }
  return { difference, worst };
}
