// The controls of a live page: the reader types, lets the model write, switches parts off, and solves
// riddles. live.js runs the model, and page.js draws the numbers of the text.

const BARS = 8;  // next tokens on the page

// ---- the text ----------------------------------------------------------------------------------

/** The reader's text, and the results of the whole model and of the model with parts switched off. */
class Play {
  constructor(gpt, ids) {
    Object.assign(this, { gpt, ids, start: 0, off: new Set() });
    this.whole = new Reading(gpt, ALL_ON);
    this.part = this.whole;  // with the parts in `off` omitted
    this.read();
  }

  /** Returns the ids that the model reads. If the text is longer than the context, these are its last ids. */
  window() {
    return this.ids.slice(this.start);
  }

  read() {
    this.whole.read(this.window());
    this.part.read(this.window());
  }

  /** Sets a new text. The first id is the end-of-text token. */
  set(ids) {
    const { block_size } = this.gpt.config;
    // The last id is only predicted, so one more than block_size fits.
    this.start = ids.length > block_size + 1 ? ids.length - block_size : 0;
    this.ids = ids;
    this.read();
  }

  /** Appends an id, as generate.py does: the context contains the last block_size ids. */
  append(id) {
    this.ids = [...this.ids, id];
    this.start = Math.max(0, this.ids.length - this.gpt.config.block_size);
    this.read();
  }

  /** Returns the logits of the next id, (vocab_size). If the context is full, omits its first id. */
  next() {
    if (this.part.next()) return this.part.next();
    const later = new Reading(this.gpt, this.off);
    later.read(this.window().slice(1));
    return later.next();
  }

  switchOff(off) {
    this.off = off;
    this.part = off.size ? new Reading(this.gpt, off) : this.whole;
    this.read();
  }

  /** Returns what page.js draws. The responses of pairs, `counted`, are known only for the first text. */
  shown() {
    const isFirst = String(this.ids) === String(data.ids);
    return {
      tokens: splitText(this.window()),
      counted: isFirst ? data.counted : null,
      looks: [liveLook(this.part, this.whole)],
    };
  }
}

/** Returns the numbers of a Reading, in the form of unpackLook in page.js. whole: the Reading with all parts on. */
function liveLook(reading, whole) {
  const { off, streams, caches, ids } = reading;
  const T = streams[0].length;
  const wholeLosses = whole.losses();
  const predictions = reading.logits.map((logits) => {
    const losses = reading.losses(logits);
    const at = (i) => {
      const wholeLoss = off.size ? wholeLosses[i - 1] : undefined;
      const k = logits === reading.logits.at(-1) ? 5 : 3;
      return { loss: losses[i - 1], wholeLoss, ...predict(logits[i - 1], ids[i], k) };
    };
    return { losses, at };
  });
  const blocks = predictions.map((prediction, i) => ({
    name: i ? `block ${i}` : "embedding",
    prediction,
    norms: streams[i].map((row) => Math.hypot(...row)),
  }));
  const calls = caches.map(({ weights }, i) => {
    if (off.has(`h.${i}`)) return { block: i + 1, fault: "the block is switched off" };
    const heads = weights.map((rows, head) => {
      const isOff = off.has(`h.${i}.attn.${head}`);
      return isOff ? null : (row, column) => rows[row][column] ?? 0;
    });
    return { block: i + 1, heads };
  });
  const { facts, sample } = data.snapshots[LAST].looks[0];
  return { facts, sample, T, prediction: predictions.at(-1), blocks, calls, error: null };
}

/** Returns the rank of an id, and the k likeliest ids with their probabilities. */
function predict(logits, id, k) {
  const probs = softmax(logits);
  const order = Array.from(probs.keys()).sort((a, b) => logits[b] - logits[a]);
  const rank = 1 + logits.filter((logit) => logit > logits[id]).length;
  return { rank, likeliest: order.slice(0, k).map((i) => [nameOfByte(i), probs[i]]) };
}

// ---- typing and writing ------------------------------------------------------------------------

const typed = byId("typed");
let timer = null;  // while the model writes

const textOf = (ids) => decode(ids.slice(1));  // omits the end-of-text token at the start

/** Reads the typed text, and chooses the token before the cursor. */
function type() {
  play.set([data.ids[0], ...encode(typed.value)]);
  state.token = tokenAtCursor();
  drawAll();
}

function tokenAtCursor() {
  const n = encode(typed.value.slice(0, typed.selectionStart)).length;
  return Math.max(0, Math.min(n, play.ids.length - 1) - play.start);
}

/** Appends a token, and chooses it. */
function appendToken(id) {
  play.append(id);
  typed.value = textOf(play.ids);
  typed.scrollTop = typed.scrollHeight;
  state.token = play.window().length - 1;
  drawAll();
}

/** Returns the probabilities of the next token at the chosen temperature and top-k. */
function nextProbabilities(logits) {
  return probabilities(logits, Number(byId("temperature").value), Number(byId("top_k").value));
}

function writeToken() {
  appendToken(draw(nextProbabilities(play.next())));
  timer = setTimeout(writeToken, 30);  // ms, so that a person can follow
}

function stopWriting() {
  clearTimeout(timer);
  timer = null;
  byId("write").textContent = "write";
}

function startWriting() {
  byId("write").textContent = "stop";
  writeToken();
}

/** Draws the likeliest next tokens as bars. Reuses the buttons, so that they keep the focus. */
function drawNext() {
  const logits = play.next();
  byId("degree").textContent = Number(byId("temperature").value).toFixed(2);
  const probs = nextProbabilities(logits);
  const order = Array.from(probs.keys()).sort((a, b) => probs[b] - probs[a] || logits[b] - logits[a]);
  for (const [i, button] of Array.from(byId("next").children).entries()) {
    const id = order[i];
    button.dataset.id = id;
    button.style.setProperty("--p", `${100 * probs[id]}%`);
    const bar = make("span", { className: "bar" });
    button.replaceChildren(tokenOf(nameOfByte(id)), bar, make("span", { text: percent(probs[id]) }));
    button.disabled = probs[id] === 0;
  }
}

// ---- switches ----------------------------------------------------------------------------------

/** Returns the rows of the picture of the model: lists of [part, label, name of its switch]. */
function pathRows({ n_layer, n_head }) {
  const rows = [[["wte", "tokens"], ["wpe", "positions", "wpe"]]];
  for (let i = 0; i < n_layer; i++) {
    const heads = Array.from({ length: n_head }, (_, head) => ["head", `head ${head + 1}`, `h.${i}.attn.${head}`]);
    rows.push([
      ["block", `block ${i + 1}`, `h.${i}`],
      ["ln_1", "ln_1"], ["c_attn", "c_attn"], ...heads, ["attn.c_proj", "c_proj"],
      ["ln_2", "ln_2"], ["mlp", "MLP", `h.${i}.mlp`],
      ["c_fc", "c_fc"], ["gelu", "gelu"], ["mlp.c_proj", "c_proj"],
    ]);
  }
  rows.push([["ln_f", "ln_f"], ["lm_head", "lm_head"], ["loss", "loss"]]);
  return rows;
}

/** Returns the shapes of what a part reads and returns, as in model.py. */
function shapesOf(part, T) {
  const { n_head, n_embd: C } = data.live.config;
  const V = play.gpt.lm_head.n_out;
  const n = shown.tokens.length - 1;  // tokens that are predicted
  const x = `(1, ${T}, ${C})`;
  const shapes = {
    wte: [`(1, ${T})`, x],
    wpe: [`(1, ${T})`, x],
    c_attn: [x, `(1, ${T}, ${3 * C})`],
    head: [`q, k, v of all heads (1, ${n_head}, ${T}, ${C / n_head}), weights (1, ${n_head}, ${T}, ${T})`,
      `(1, ${n_head}, ${T}, ${C / n_head})`],
    c_fc: [x, `(1, ${T}, ${4 * C})`],
    gelu: [`(1, ${T}, ${4 * C})`, `(1, ${T}, ${4 * C})`],
    "mlp.c_proj": [`(1, ${T}, ${4 * C})`, x],
    lm_head: [x, `(1, ${T}, ${V})`],
    loss: [`logits of the predictions of tokens 1 to ${n} (1, ${n}, ${V}), right tokens (1, ${n})`, "one number"],
  };
  return shapes[part] ?? [x, x];
}

let pointed = null;  // [part, label] of the part whose shapes the page shows

/** Shows the shapes of the part that is pointed at, and the line of model.py that computes it. */
function drawPart() {
  if (!pointed) return;
  const [part, label] = pointed;
  const [before, after] = shapesOf(part, shown.looks[0].T);
  const [number, line] = data.live.lines[part] ?? [];
  const code = line ? [make("code", { text: line }), ` model.py, line ${number}`] : [];
  byId("part").replaceChildren(make("b", { text: label }), `: ${before} → ${after}`, make("br"), ...code);
}

/** Makes the picture of the model: a button for each part that can be switched off, a word for each other part. */
function makePath() {
  for (const row of pathRows(data.live.config)) {
    const parts = row.map(([part, label, name]) => {
      const element = name
        ? make("button", { text: label, role: "switch", "data-part": name, "aria-label": nameOfPart(name) })
        : make("span", { text: label, tabindex: "0" });
      for (const event of ["pointerenter", "focus"]) {
        element.addEventListener(event, () => {
          pointed = [part, name ? nameOfPart(name) : part];
          drawPart();
        });
      }
      if (name) element.addEventListener("click", () => toggle(name));
      return element;
    });
    byId("path").append(make("div", {}, parts));
  }
}

/** Switches a part off or on. */
function toggle(name) {
  const off = new Set(play.off);
  if (!off.delete(name)) off.add(name);
  play.switchOff(off);
  drawAll();
}

/** Returns the name of a part for the reader: "h.0.attn.1" is "block 1, head 2". */
function nameOfPart(name) {
  if (name === "wpe") return "positions";
  const [, block, part, head] = name.split(".");
  const inBlock = { attn: `, head ${Number(head) + 1}`, mlp: ", MLP" }[part] ?? "";
  return `block ${Number(block) + 1}${inBlock}`;
}

const signed = (x) => `${x < 0 ? "−" : "+"}${Math.abs(x).toFixed(4)}`;

/** Shows the mean loss, and how much the parts that are off change it. */
function drawCost() {
  const off = Array.from(play.off, nameOfPart).join("; ");
  const mean = meanOf({ losses: play.part.losses() });
  const whole = meanOf({ losses: play.whole.losses() });
  const change = off ? `. Without ${off}: ${mean.toFixed(4)} (${signed(mean - whole)})` : "";
  const line = countedTokens().length ? `Mean loss of ${nameOfCounted()}: ${whole.toFixed(4)}${change}` : NO_TOKENS;
  byId("mean").textContent = line;
  byId("cost").textContent = off ? line : "All parts are on.";
  colourByLoss(byId("again").firstChild, shown.looks[0]);
  byId("all_on").hidden = !off;
  byId("restore").hidden = String(play.ids) === String(data.ids);
  for (const button of byId("path").querySelectorAll("button")) {
    const { part } = button.dataset;
    button.setAttribute("aria-checked", String(!play.off.has(part)));
    // In a block that is off, a switch changes nothing.
    button.disabled = Array.from(play.off).some((name) => part.startsWith(`${name}.`));
  }
}

// ---- riddles -----------------------------------------------------------------------------------

const HIGH_LOSS = 6;  // nats
const SURE = 0.9;

/** Returns the names of all heads. */
function namesOfHeads() {
  const { n_layer, n_head } = data.live.config;
  return Array.from({ length: n_layer * n_head }, (_, i) => `h.${Math.floor(i / n_head)}.attn.${i % n_head}`);
}
const namesOfBlocks = () => play.gpt.h.map((_, i) => `h.${i}`);
const namesOfMLPs = () => play.gpt.h.map((_, i) => `h.${i}.mlp`);

/** Returns the mean weight of a head in the column to the left of the diagonal. */
function weightBefore(name) {
  const [, block, , head] = name.split(".");
  const rows = play.whole.caches[block].weights[head].slice(1);
  return rows.reduce((sum, row, t) => sum + row[t], 0) / rows.length;
}

/** Returns how much the mean loss of the tokens `from` to `to` rises without a part. */
function riseWithout(name, from, to) {
  const reading = new Reading(play.gpt, new Set([name]));
  reading.read(play.window());
  const [without, whole] = [reading, play.whole].map((each) => each.losses().slice(from - 1, to));
  return without.reduce((sum, loss, i) => sum + loss - whole[i], 0) / whole.length;
}

/** Returns the word of a riddle as [first, last token]: the first speaker, or the longest word. */
function findWord() {
  // One code unit per token, because a match counts code units: "L" for each byte of a letter, and
  // the first code unit of every other character.
  let unit = " ";
  const units = shown.tokens.slice(1).map((token) => {
    if (token) unit = /\p{L}/u.test(token) ? "L" : token[0];  // an empty token continues a character
    return unit;
  }).join("");
  const words = Array.from(units.matchAll(/LL+/g));
  const isSpeaker = ({ 0: word, index }) => units[index + word.length] === ":";
  const found = words.find(isSpeaker) ?? words.sort((a, b) => b[0].length - a[0].length)[0];
  return found && [found.index + 1, found.index + found[0].length];
}

/** Returns the word of findWord as a string. */
function word() {
  const [first, last] = findWord() ?? [1, 0];
  return shown.tokens.slice(first, last + 1).join("");
}

/** Returns [whether the answer has the largest measure of all names, the answer's measure]. */
function judge(answer, names, measure) {
  const own = measure(answer);
  return [names.every((name) => measure(name) <= own), own];
}

function checkHead(answer) {
  const [isRight, weight] = judge(answer, namesOfHeads(), weightBefore);
  const sentence = `In the column to the left of the diagonal, the mean weight of this head is ${weight.toFixed(2)}.`;
  return [isRight, isRight ? sentence : `${sentence} The mean weight of a different head is larger.`];
}

/** Returns whether exactly one letter of the first text is replaced by another letter. */
function isOneLetterReplaced() {
  const [first, now] = [data.ids, play.ids].map((ids) => Array.from(textOf(ids)));
  const changed = first.map((_, i) => i).filter((i) => first[i] !== now[i]);
  const isLetter = (letters) => /\p{L}/u.test(letters[changed[0]]);
  return data.ids.length === play.ids.length && changed.length === 1 && isLetter(first) && isLetter(now);
}

function checkLetter() {
  if (!isOneLetterReplaced()) {
    return [false, "The text must be the first text, with exactly one letter replaced by another letter."];
  }
  const losses = play.whole.losses();
  const others = Array.from(losses.keys()).filter((t) => data.ids[t + 1] === play.ids[t + 1]);
  const t = others.reduce((a, b) => (losses[b] > losses[a] ? b : a));
  const found = `Token ${t + 1} has the largest loss of the other tokens, ${losses[t].toFixed(2)}`;
  if (losses[t] <= HIGH_LOSS) return [false, `Not yet. ${found}. Where is the model sure of the next token?`];
  return [true, `${found}: the model was sure of a different token, which costs more than a uniform guess.`];
}

function checkBlock(answer) {
  const [first, last] = findWord() ?? [];
  if (!first) return [false, "Type a word of several letters first."];
  const [isRight, rise] = judge(answer, namesOfBlocks(), (name) => riseWithout(name, first + 1, last));
  const sentence = `Without this block, the mean loss of the letters of “${word()}” after the first letter `
    + `changes by ${signed(rise)}.`;
  return [isRight, isRight ? sentence : `${sentence} Without a different block, the mean loss rises more.`];
}

function checkTemperature() {
  if (byId("top_k").value !== "0") return [false, "Set top-k to “all”, and change only the temperature."];
  const temperature = Number(byId("temperature").value);
  const logits = play.next();
  const [own, now] = [1, temperature].map((degree) => Math.max(...probabilities(logits, degree, 0)));
  if (own >= SURE) return [false, "The model is already sure here. Type more, until the model is not sure."];
  if (temperature === 0) return [false, "A temperature of 0 does not count: it always selects the likeliest token."];
  if (now < SURE) return [false, `At temperature ${temperature}, the likeliest token has a probability of ${percent(now)}.`];
  return [true, `Its probability is ${percent(own)} at temperature 1, and ${percent(now)} at temperature ${temperature}: `
    + `division by ${temperature} increases the differences of the logits.`];
}

function checkLeast(answer) {
  const names = [...namesOfHeads(), ...namesOfMLPs()];
  const rise = (name) => riseWithout(name, 1, Infinity);
  const [isRight] = judge(answer, names, (name) => -Math.abs(rise(name)));
  const sentence = `Without this part, the mean loss changes by ${signed(rise(answer))}.`;
  return [isRight, isRight ? sentence : `${sentence} Without a different part, the mean loss changes less.`];
}

/** The riddles. question() returns a text, choices() the names of parts, and check(answer) [isRight, sentence]. */
const RIDDLES = [
  {
    question: () => "In the pictures under “Attention”, each row is a token that attends. Which head has the largest mean "
      + "weight in the column to the left of the diagonal? In the row of token 5, this is the column of token 4.",
    choices: namesOfHeads,
    check: checkHead,
  },
  {
    question: () => `Replace one letter of the first text, so that the loss of a different token rises above ${HIGH_LOSS}.`,
    check: checkLetter,
  },
  {
    question: () => (findWord()
      ? `Which block does the model need most to predict the letters of “${word()}” after the first letter, `
        + "in the text above? Switch off one block at a time, and watch the losses of these letters."
      : "Which block does the model need most to predict the letters of a word? Type a word of several letters first."),
    choices: namesOfBlocks,
    check: checkBlock,
  },
  {
    question: () => `Change only the temperature, so that the likeliest token after the text above has a probability of `
      + `at least ${100 * SURE}%.`,
    check: checkTemperature,
  },
  {
    question: () => "Which head or MLP changes the mean loss of the text above least if you switch it off? An increase and a "
      + "decrease count alike.",
    choices: () => [...namesOfHeads(), ...namesOfMLPs()],
    check: checkLeast,
  },
];

/** Makes a riddle: its question, the choices if there are any, and a button that checks. */
function makeRiddle({ choices, check }) {
  const select = make("select", { "aria-label": "answer" });
  select.append(make("option", { text: "?", value: "" }));
  for (const name of choices?.() ?? []) select.append(make("option", { text: nameOfPart(name), value: name }));
  const button = make("button", { text: "check" });
  const answer = make("output");
  const parts = [make("span", { className: "question" }), " ", ...(choices ? [select, " "] : []), button, " ", answer];
  const riddle = make("li", {}, parts);
  const checkAnswer = () => {
    if (choices && !select.value) return [false, "Choose an answer first."];
    return play.window().length < 3 ? [false, "Type a longer text first."] : check(select.value);
  };
  button.addEventListener("click", () => {
    const [isRight, sentence] = checkAnswer();
    const text = onOneLine(typed.value);
    const end = text.length > 64 ? `…${text.slice(-64)}` : text;
    answer.textContent = isRight ? `✓ Right. ${sentence} The text was “${end}”.` : sentence;
    answer.classList.toggle("right", isRight);
    if (isRight) riddle.classList.add("solved");  // the riddle stays solved when the text changes
  });
  return riddle;
}

let asked = null;  // the text that the questions are about

/** Draws the questions. If the text has changed, removes the old answers, except right answers. */
function drawQuestions() {
  const text = String(play.ids);
  const riddles = Array.from(byId("riddles").children);
  RIDDLES.forEach(({ question }, i) => { riddles[i].querySelector(".question").textContent = question(); });
  if (asked !== text) byId("riddles").querySelectorAll("output:not(.right)").forEach((answer) => answer.replaceChildren());
  asked = text;
}

// ---- the start ---------------------------------------------------------------------------------

/** Draws what only a live page contains. page.js calls this function after it has drawn the rest. */
function drawPlay() {
  const isLive = state.snapshot === LAST;
  for (const element of document.querySelectorAll(".play")) element.hidden = !isLive;
  byId("live").textContent = isLive
    ? `Live: this page runs the model. Its losses differ from PyTorch's by at most ${play.difference}.`
    : `look.py has stored these numbers. The page can run only the model of ${data.snapshots[LAST].name}.`;
  byId("stored").hidden = isLive;
  if (!isLive) {
    stopWriting();
    return;
  }
  drawCost();
  drawPart();
  drawNext();
  drawQuestions();
}

/** Unpacks the model, and compares it with PyTorch. Returns a Play, or the reason why the page runs no model. */
function unpackModel({ config, weights, checks, why }) {
  if (why) return why;
  const arrays = Object.entries(weights).map(([name, text]) => [name, unpack(text, Float32Array)]);
  const gpt = new GPT(config, Object.fromEntries(arrays));
  const unpacked = checks.map(({ ids, losses }) => {
    const pairs = Object.entries(losses).map(([factor, text]) => [factor, unpack(text, Float32Array)]);
    return { ids, losses: Object.fromEntries(pairs) };
  });
  const { difference, worst } = compare(gpt, unpacked);
  if (!(worst <= TOLERANCE)) {  // also true for NaN
    return `its losses differ from PyTorch's by a relative error of up to ${worst.toPrecision(2)}: model.py was changed`;
  }
  const made = new Play(gpt, data.ids);
  made.difference = difference.toExponential(0);
  return made;
}

function startPlay() {
  const made = unpackModel(data.live);
  if (!(made instanceof Play)) {
    byId("live").textContent = `This page shows numbers that look.py has stored, and does not run the model: ${made}.`;
    return;
  }
  play = made;
  typed.value = textOf(play.ids);
  byId("stored").textContent = "Only the last checkpoint is live. This is the first text. The page shows your text again "
    + `at ${data.snapshots[LAST].name}.`;
  const { block_size } = play.gpt.config;
  byId("context").textContent = `The context has ${block_size} tokens. If the text is longer, the model reads the last `
    + `${block_size} tokens. The page then shows them as tokens 0 to ${block_size - 1}.`;
  for (let i = 0; i < BARS; i++) {
    const button = make("button");
    button.addEventListener("click", () => appendToken(Number(button.dataset.id)));
    byId("next").append(button);
  }
  const ks = [0, 1, 2, 3, 5, 10, 20, 50].filter((k) => k < data.vocabulary);
  for (const k of ks) byId("top_k").append(make("option", { text: k || "all", value: k }));
  makePath();
  byId("again").append(makeText("the text again, losses"));
  byId("riddles").append(...RIDDLES.map(makeRiddle));
  typed.addEventListener("input", () => { stopWriting(); type(); });
  byId("restore").addEventListener("click", () => {
    stopWriting();
    typed.value = textOf(data.ids);
    type();
  });
  byId("temperature").addEventListener("input", drawNext);
  byId("top_k").addEventListener("change", drawNext);
  byId("write").addEventListener("click", () => (timer ? stopWriting() : startWriting()));
  byId("all_on").addEventListener("click", () => {
    play.switchOff(new Set());
    drawAll();
  });
}

startPlay();
drawAll();
