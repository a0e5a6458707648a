"use strict";
// GPT-2's forward pass, as in model.py, for one text: B is 1, and there is no dropout. A tensor
// (T, C) is a Float32Array with T rows of C numbers, one row after the other. JavaScript computes
// sums in float64.

/** nn.Linear: x @ weight.T + bias. */
class Linear {
  /** weight: (n_out, n_in). bias: (n_out), or undefined. */
  constructor(weight, bias, n_in) {
    Object.assign(this, { weight, n_in, n_out: weight.length / n_in });
    this.bias = bias ?? new Float32Array(this.n_out);
  }

  forward(x) {
    const { weight, bias, n_in, n_out } = this;
    const T = x.length / n_in;
    const y = new Float32Array(T * n_out);  // (T, n_out)
    // This loop computes eight independent sums at a time, of two rows of x and four rows of the
    // weight, which is four times as fast. If no row is left, the loop repeats the last row.
    for (let o = 0; o < n_out; o += 4) {
      const [o0, o1, o2, o3] = [0, 1, 2, 3].map((j) => Math.min(o + j, n_out - 1));
      const [w0, w1, w2, w3] = [o0 * n_in, o1 * n_in, o2 * n_in, o3 * n_in];
      const [bias0, bias1, bias2, bias3] = [bias[o0], bias[o1], bias[o2], bias[o3]];
      for (let t = 0; t < T; t += 2) {
        const [x0, x1] = [t * n_in, Math.min(t + 1, T - 1) * n_in];
        const [y0, y1] = [t * n_out, Math.min(t + 1, T - 1) * n_out];
        let [a0, a1, a2, a3] = [bias0, bias1, bias2, bias3];
        let [b0, b1, b2, b3] = [bias0, bias1, bias2, bias3];
        for (let i = 0; i < n_in; i++) {
          const a = x[x0 + i];
          const b = x[x1 + i];
          a0 += weight[w0 + i] * a;
          a1 += weight[w1 + i] * a;
          a2 += weight[w2 + i] * a;
          a3 += weight[w3 + i] * a;
          b0 += weight[w0 + i] * b;
          b1 += weight[w1 + i] * b;
          b2 += weight[w2 + i] * b;
          b3 += weight[w3 + i] * b;
        }
        y[y0 + o0] = a0;
        y[y0 + o1] = a1;
        y[y0 + o2] = a2;
        y[y0 + o3] = a3;
        y[y1 + o0] = b0;
        y[y1 + o1] = b1;
        y[y1 + o2] = b2;
        y[y1 + o3] = b3;
      }
    }
    return y;
  }
}

/** nn.LayerNorm: normalizes each row to mean 0 and variance 1, then applies weight and bias. */
class LayerNorm {
  /** weight, bias: (C). */
  constructor(weight, bias) {
    Object.assign(this, { weight, bias });
  }

  forward(x) {
    const C = this.weight.length;
    const y = new Float32Array(x.length);  // (T, C)
    for (let at = 0; at < x.length; at += C) {
      const row = x.subarray(at, at + C);  // (C)
      const mean = row.reduce((sum, value) => sum + value, 0) / C;
      const variance = row.reduce((sum, value) => sum + (value - mean) ** 2, 0) / C;
      const scale = 1 / Math.sqrt(variance + 1e-5);
      for (let c = 0; c < C; c++) y[at + c] = (row[c] - mean) * scale * this.weight[c] + this.bias[c];
    }
    return y;
  }
}

/** The keys, the values and the attention weights of one block for the tokens so far. */
class KVCache {
  constructor({ block_size, n_embd, n_head }) {
    this.k = new Float32Array(block_size * n_embd);  // (block_size, C)
    this.v = new Float32Array(block_size * n_embd);  // (block_size, C)
    this.weights = Array.from({ length: n_head }, () => []);  // nh lists of T rows: (1), (2), ... (T)
  }
}

class CausalSelfAttention {
  constructor(config, layer, index) {
    Object.assign(this, { index, n_head: config.n_head });
    this.c_attn = layer("attn.c_attn", config.n_embd);
    this.c_proj = layer("attn.c_proj", config.n_embd);
  }

  /** x: (T, C), for the tokens from position `start` on. off: names of the parts that are omitted. */
  forward(x, start, cache, off) {
    const C = this.c_attn.n_in;
    const T = x.length / C;
    const hs = C / this.n_head;
    const qkv = this.c_attn.forward(x);  // (T, 3C)
    for (let t = 0; t < T; t++) {
      const [q, k, v, end] = [0, 1, 2, 3].map((j) => (3 * t + j) * C);
      cache.k.set(qkv.subarray(k, v), (start + t) * C);
      cache.v.set(qkv.subarray(v, end), (start + t) * C);
    }
    const y = new Float32Array(T * C);  // (T, C)
    for (let head = 0; head < this.n_head; head++) {
      for (let t = 0; t < T; t++) {
        const q = qkv.subarray(3 * t * C + head * hs, 3 * t * C + (head + 1) * hs);  // (hs)
        const scores = new Float32Array(start + t + 1);  // of the keys up to its own: causal
        for (let s = 0; s < scores.length; s++) {
          const at = s * C + head * hs;
          let score = 0;
          for (let i = 0; i < hs; i++) score += q[i] * cache.k[at + i];
          scores[s] = score / Math.sqrt(hs);
        }
        const weights = softmax(scores);  // (start + t + 1)
        cache.weights[head][start + t] = weights;
        if (off.has(`h.${this.index}.attn.${head}`)) continue;  // its part of y stays 0
        for (let s = 0; s < weights.length; s++) {
          const [from, to] = [s * C + head * hs, t * C + head * hs];
          for (let i = 0; i < hs; i++) y[to + i] += weights[s] * cache.v[from + i];
        }
      }
    }
    return this.c_proj.forward(y);  // (T, C)
  }
}

class MLP {
  constructor(config, layer) {
    this.c_fc = layer("mlp.c_fc", config.n_embd);
    this.c_proj = layer("mlp.c_proj", 4 * config.n_embd);
  }

  forward(x) {
    x = this.c_fc.forward(x).map(gelu);  // (T, 4C)
    return this.c_proj.forward(x);  // (T, C)
  }
}

class Block {
  constructor(config, weights, index) {
    const get = (name) => weights[`transformer.h.${index}.${name}`];
    const layer = (name, n_in) => new Linear(get(`${name}.weight`), get(`${name}.bias`), n_in);
    this.index = index;
    this.ln_1 = new LayerNorm(get("ln_1.weight"), get("ln_1.bias"));
    this.attn = new CausalSelfAttention(config, layer, index);
    this.ln_2 = new LayerNorm(get("ln_2.weight"), get("ln_2.bias"));
    this.mlp = new MLP(config, layer);
  }

  forward(x, start, cache, off) {
    if (off.has(`h.${this.index}`)) return x;
    x = add(x, this.attn.forward(this.ln_1.forward(x), start, cache, off));
    if (off.has(`h.${this.index}.mlp`)) return x;
    return add(x, this.mlp.forward(this.ln_2.forward(x)));  // (T, C)
  }
}

class GPT {
  /** config: n_layer, n_head, n_embd, block_size. weights: {name in model.py: Float32Array}. */
  constructor(config, weights) {
    this.config = config;
    this.wte = weights["transformer.wte.weight"];  // (vocab_size, C)
    this.wpe = weights["transformer.wpe.weight"];  // (block_size, C)
    this.h = Array.from({ length: config.n_layer }, (_, i) => new Block(config, weights, i));
    this.ln_f = new LayerNorm(weights["transformer.ln_f.weight"], weights["transformer.ln_f.bias"]);
    this.lm_head = new Linear(weights["lm_head.weight"] ?? this.wte, undefined, config.n_embd);
  }

  /** Returns the residual streams: [(T, C) after the embedding, (T, C) after block 1, ...].
   *
   * idx: the T ids. start: the number of earlier tokens, which are in the caches. caches: a KVCache
   * for each block. off: a Set with the names of the parts that are omitted: "wpe" (the position
   * embedding), "h.0" (the first block), "h.0.mlp" (its MLP), "h.0.attn.1" (its second head). */
  hidden(idx, start, caches, off) {
    const C = this.config.n_embd;
    const x = new Float32Array(idx.length * C);  // (T, C)
    for (let t = 0; t < idx.length; t++) {
      for (let c = 0; c < C; c++) {
        const position = off.has("wpe") ? 0 : this.wpe[(start + t) * C + c];
        x[t * C + c] = this.wte[idx[t] * C + c] + position;
      }
    }
    const streams = [x];
    for (const [i, block] of this.h.entries()) {
      streams.push(block.forward(streams.at(-1), start, caches[i], off));
    }
    return streams;
  }

  /** Applies the final LayerNorm and the head: (T, C) -> (T, vocab_size). */
  logits(x) {
    return this.lm_head.forward(this.ln_f.forward(x));
  }
}

const add = (a, b) => a.map((value, i) => value + b[i]);

/** nn.GELU(approximate="tanh"): 0.5 x (1 + tanh(z)), which is x / (1 + exp(-2z)). */
function gelu(x) {
  const z = Math.sqrt(2 / Math.PI) * (x + 0.044715 * x * x * x);
  return x / (1 + Math.exp(-2 * z));
}

/** Converts scores to probabilities. */
function softmax(scores) {
  const largest = largestOf(scores);
  const probs = new Float32Array(scores.length);
  let sum = 0;
  for (let i = 0; i < scores.length; i++) {
    probs[i] = Math.exp(scores[i] - largest);
    sum += probs[i];
  }
  for (let i = 0; i < scores.length; i++) probs[i] /= sum;
  return probs;
}

/** The loss of an id: its cross-entropy in nats. logits: (vocab_size). */
function crossEntropy(logits, id) {
  const largest = largestOf(logits);
  let sum = 0;
  for (const logit of logits) sum += Math.exp(logit - largest);
  return Math.log(sum) + largest - logits[id];
}

function largestOf(values) {
  let largest = -Infinity;
  for (const value of values) largest = Math.max(largest, value);  // NaN if a value is NaN
  return largest;
}
