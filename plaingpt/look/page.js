// Draws what models do with a text. look.py has recorded it, or play.js computes it.
// The address contains the reader's choice after "#", so that a link shows the same view: token (a
// number), snapshot (the position of the slider), head (run, call and head, such as 0.1.3).

const data = JSON.parse(document.getElementById("data").textContent);
const GUESS = Math.log(data.vocabulary);  // the loss of a uniform guess
const WIDEST = 3;  // nats: larger differences between two losses have the same colour
const LAST = data.snapshots.length - 1;
// At first, the middle of the text is chosen, or the first token of a response.
const FIRST = data.counted ? data.counted.indexOf(true) : Math.floor(data.tokens.length / 2);
const state = { token: FIRST, snapshot: LAST, head: [0, 0, 0] };
let shown;  // what the page draws: {tokens, counted, looks}, as in recorded()
let play = null;  // the Play of play.js, if the page runs the model
const names = nameRuns();
const texts = [];  // the elements with the text: each contains a span for each token
const heads = [];  // the buttons of all heads on the page
const arcs = [];  // for each run: {element, svg, list}, the text with its arcs, and their list

/** Returns short names of the runs: the last parts of their paths, if these differ. */
function nameRuns() {
  const ends = data.runs.map((run) => run.replace(/\/+$/, "").split("/").pop());
  return new Set(ends).size < ends.length ? data.runs : ends;
}

// ---- numbers -----------------------------------------------------------------------------------

const unpacked = new Map();

/** Unpacks a Base64 string into an array of a type. Unpacks each string only once. */
function unpack(text, Type) {
  if (!unpacked.has(text)) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    unpacked.set(text, new Type(bytes.buffer));
  }
  return unpacked.get(text);
}

const isCounted = (i) => i > 0 && (!shown.counted || shown.counted[i]);  // whether the loss of token i counts
const countedTokens = () => shown.tokens.map((_, i) => i).filter(isCounted);
const chosenRow = () => state.token - 1;  // the row of the attention weights at which the model predicts the chosen token

/** Returns the recorded numbers of a snapshot, with the tokens of the recorded text. */
function recorded(snapshot) {
  return { tokens: data.tokens, counted: data.counted, looks: snapshot.looks.map(unpackLook) };
}

/** Unpacks the recorded numbers of a model. liveLook in play.js returns the same fields. */
function unpackLook(look) {
  const T = data.tokens.length - 1;  // the tokens that the model reads: all but the last one
  const blocks = look.blocks.map((block) => (block.fault ? block : {
    name: block.name,
    prediction: unpackPrediction(block.prediction),
    norms: unpack(block.norms, Float32Array),
  }));
  const calls = look.calls?.map((call) => (call.fault ? call : {
    block: call.block,
    heads: call.heads.map((head) => weightsOf(unpack(head, Uint8Array), call.causal, T)),
  }));
  return { ...look, T, prediction: unpackPrediction(look.prediction), blocks, calls };
}

/** Unpacks a prediction. Returns {losses, at}; at(i) returns {loss, rank, likeliest} of token i. */
function unpackPrediction({ losses, ids, probs, ranks, k }) {
  const unpackedLosses = unpack(losses, Float32Array);
  return {
    losses: unpackedLosses,
    at(i) {
      const few = Array.from(unpack(ids, Uint32Array).slice((i - 1) * k, i * k), (id) => data.names[id]);
      const fewProbs = unpack(probs, Float32Array).slice((i - 1) * k, i * k);
      return {
        loss: unpackedLosses[i - 1],
        rank: unpack(ranks, Uint32Array)[i - 1],
        likeliest: few.map((name, j) => [name, fewProbs[j]]),
      };
    },
  };
}

/** Returns the weights of a head as a function of row and column, from 0 to 1. */
function weightsOf(values, causal, T) {
  if (!causal) return (row, column) => values[row * T + column] / 255;
  return (row, column) => (column > row ? 0 : values[row * (row + 1) / 2 + column] / 255);
}

/** Returns the mean of the losses that count. The page computes the mean, because JSON has no NaN. */
function meanOf({ losses }) {
  const counted = countedTokens();
  return counted.reduce((sum, i) => sum + losses[i - 1], 0) / counted.length;
}

/** Returns [column, weight] of the token that a row attends to most. */
function mostSeen(weights, row, T) {
  let best = 0;
  for (let column = 1; column < T; column++) {
    if (weights(row, column) > weights(row, best)) best = column;
  }
  return [best, weights(row, best)];
}

// ---- elements ----------------------------------------------------------------------------------

/** Makes an element. Its text is inserted as plain text, never as HTML. */
function make(tag, { text, className, ...rest } = {}, children = []) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  for (const [name, value] of Object.entries(rest)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const byId = (id) => document.getElementById(id);

/** Makes control characters visible, even those that change the direction of a text. */
function visible(text) {
  return text.replace(/[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]/g, (letter) =>
    `<${letter.charCodeAt(0).toString(16).toUpperCase().padStart(2, "0")}>`);
}

const onOneLine = (text) => visible(text).replace(/\n/g, "⏎").replace(/\t/g, "⇥");

const inToken = (text) => onOneLine(text).replace(/ /g, "␣");  // makes spaces visible, too

/** Makes a token for a table. */
function tokenOf(text) {
  return make("span", { className: "token", text: inToken(text) });
}

const formatLarge = (x) => (x < 1e6 ? x.toFixed(2) : x.toExponential(2));
const percent = (p) => (p < 0.0005 ? "< 0.1%" : `${(100 * p).toFixed(1)}%`);
const nameOf = (i) => shown.tokens[i] || "·";  // a byte that continues a character
const describe = (i) => [`token ${i} `, tokenOf(nameOf(i))];
const NOT_PREDICTED = "No token precedes this token, so it is not predicted.";

/** Makes a table. rows: lists of cells. A cell is a text, a number as a text, or an element. */
function makeTable(titles, rows) {
  const table = make("table");
  table.append(make("tr", {}, titles.map((text) => make("th", { text }))));
  for (const row of rows) {
    const cells = row.map((cell) => {
      const isElement = cell instanceof Element;
      const isNumber = !isElement && /^[-+<]? ?[\d.]+%?$/.test(cell);
      return make("td", isNumber ? { className: "number" } : {}, [cell]);
    });
    table.append(make("tr", {}, cells));
  }
  return table;
}

// ---- texts -------------------------------------------------------------------------------------

/** Makes a text in which a token can be chosen. */
function makeText(label) {
  const element = make("div", { className: "text", role: "listbox", tabindex: "0", "aria-label": label });
  // The card becomes sticky only after the reader uses a text. Before, on a small screen, a sticky
  // card would cover the text.
  for (const use of ["pointerenter", "focus"]) {
    element.addEventListener(use, () => byId("card").classList.add("sticky"));
  }
  for (const [event, act] of [["pointerover", drawCard], ["click", (i) => choose({ token: i })]]) {
    element.addEventListener(event, ({ target }) => {
      if (target !== element) act(spansOf(element).indexOf(target));
    });
  }
  element.addEventListener("pointerleave", () => drawCard(state.token));
  element.addEventListener("keydown", (event) => {
    const last = shown.tokens.length - 1;
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -last, End: last }[event.key];
    if (!step) return;
    event.preventDefault();
    choose({ token: Math.max(0, Math.min(last, state.token + step)) });
    spansOf(element)[state.token].scrollIntoView({ block: "nearest" });
  });
  texts.push(element);
  return element;
}

/** Fills all texts with the tokens that are shown. */
function fillTexts() {
  for (const element of texts) {
    const parts = shown.tokens.flatMap((text, i) => {
      const span = make("span", { text: onOneLine(text || "·"), role: "option" });
      if (!text) span.className = "part";
      if (i === 0) span.className = "special";
      if (shown.counted && shown.counted[i]) span.classList.add("counted");
      // Line breaks follow the span, because the frame of a chosen token must be on a single line.
      return [span, "\n".repeat(text.split("\n").length - 1)];
    });
    element.replaceChildren(...parts);
  }
}

const spansOf = (element) => Array.from(element.children);

/** Colours a text. weightOf(i) is from -1 to 1. Weights below 0 get a different colour. */
function colour(element, weightOf) {
  spansOf(element).forEach((span, i) => {
    const weight = Math.max(-1, Math.min(1, weightOf(i) || 0));
    span.style.setProperty("--weight", `${Math.round(100 * Math.abs(weight))}%`);
    span.classList.toggle("less", weight < 0);
  });
}

// ---- the parts of the page ---------------------------------------------------------------------

/** Makes an element for each run with makeOne(look, index of the run). If there are two runs, shows their names. */
function sides(makeOne) {
  return shown.looks.map((look, run) => {
    const title = data.runs.length > 1 ? [make("h3", { text: names[run] })] : [];
    return make("div", { className: "side" }, [...title, makeOne(look, run)]);
  });
}

/** Returns a text that names the tokens whose losses count. */
function nameOfCounted() {
  const n = countedTokens().length;
  return shown.counted ? `${n} tokens of the responses` : `tokens 1 to ${n}`;
}

const NO_TOKENS = "The text contains no tokens to score.";

function drawFacts() {
  const rows = shown.looks.map((look, run) => {
    const mean = meanOf(look.prediction);
    const score = `Mean loss ${mean.toFixed(4)} nats per token over ${nameOfCounted()}, `
      + `which is a perplexity of ${formatLarge(Math.exp(mean))}.`;
    return make("p", { text: `${data.runs[run]}: ${look.facts}. ${countedTokens().length ? score : NO_TOKENS}` });
  });
  if (data.note) rows.push(make("p", { className: "note", text: data.note }));
  byId("facts").replaceChildren(...rows);
}

function drawSnapshot() {
  byId("slider").value = state.snapshot;
  byId("slider").setAttribute("aria-valuetext", data.snapshots[state.snapshot].name);
  byId("snapshot").textContent = data.snapshots[state.snapshot].name;
  byId("samples").replaceChildren(...sides((look) => make("pre", { text: visible(look.sample) })));
}

function drawLosses() {
  shown.looks.forEach((look, run) => colourByLoss(texts[run], look));
}

function colourByLoss(element, { prediction }) {
  colour(element, (i) => (isCounted(i) ? prediction.losses[i - 1] / GUESS : 0));
}

/** Makes a list of the likeliest tokens with their probabilities. */
function listLikeliest(likeliest) {
  const parts = likeliest.map(([name, p]) => make("span", {}, [tokenOf(name), ` ${percent(p)}`]));
  return make("div", { className: "likeliest" }, parts);
}

/** Shows what the models predict for token i. */
function drawCard(i) {
  if (i === 0) {
    byId("card").replaceChildren(make("div", {}, describe(i)), NOT_PREDICTED);
    return;
  }
  const whole = shown.tokens[i] ? [] : [", which belongs to ", tokenOf(shown.tokens.slice(0, i).findLast(Boolean)), ","];
  const title = make("div", {}, ["How ", ...describe(i), ...whole, " was predicted from earlier tokens:"]);
  const parts = sides((look) => {
    const { loss, wholeLoss, rank, likeliest } = look.prediction.at(i);
    const before = wholeLoss === undefined ? "" : ` (with all parts on: ${wholeLoss.toFixed(4)})`;
    const line = `loss ${loss.toFixed(4)}${before} · probability ${percent(Math.exp(-loss))} · rank ${rank}`;
    return make("div", {}, [make("div", { text: line }), "The model predicted:", listLikeliest(likeliest)]);
  });
  byId("card").replaceChildren(title, make("div", { className: "sides" }, parts));
}

function drawBlocks() {
  for (const element of document.querySelectorAll(".chosen")) {
    element.replaceChildren(...describe(state.token));
  }
  if (state.token === 0) {
    byId("blocks").replaceChildren(NOT_PREDICTED);
    return;
  }
  const titles = ["after", "likeliest", "right", "loss", "mean loss", "norm of x"];
  byId("blocks").replaceChildren(...sides((look) => {
    const rows = look.blocks.map((block) => rowOfBlock(block));
    return make("div", { className: "wide" }, [makeTable(titles, rows)]);
  }));
}

function rowOfBlock(block) {
  if (block.fault) return [block.name, `not shown: ${block.fault}`];
  const { loss, likeliest } = block.prediction.at(state.token);
  const mean = meanOf(block.prediction);
  const norm = block.norms[chosenRow()];
  const numbers = [percent(Math.exp(-loss)), loss.toFixed(4), mean.toFixed(2), norm.toFixed(2)];
  return [block.name, listLikeliest(likeliest), ...numbers];
}

/** Draws all heads. markHeads() adds what depends on the chosen token. */
function drawAttention() {
  heads.length = 0;
  byId("attention").replaceChildren(...sides((look, run) => {
    const part = make("div");
    if (!look.calls) {
      part.append("To keep the page small, it contains attention weights only for the last checkpoint.");
      return part;
    }
    look.calls.forEach((call, c) => {
      const title = `block ${call.block}`;
      if (call.fault) {
        part.append(make("p", { className: "note", text: `${title}: not shown, because ${call.fault}.` }));
        return;
      }
      const buttons = call.heads.map((_, head) => makeHead(look, call, [run, c, head]));
      part.append(make("div", { className: "quiet", text: title }));
      part.append(make("div", { className: "heads" }, buttons));
    });
    return part;
  }));
}

function makeHead({ T }, call, place) {
  const head = place[2];
  const weights = call.heads[head];
  const button = make("button", { "aria-label": `block ${call.block}, head ${head + 1}` });
  const seen = make("div");
  button.append(...(weights ? [drawMatrix(weights, T, 96, -1)] : []), `head ${head + 1}`, seen);
  button.addEventListener("click", () => choose({ head: place }));
  heads.push({ button, seen, weights, place, T });
  return button;
}

/** Shows, below each head, the token with its largest weight. Marks the chosen head. */
function markHeads() {
  for (const { button, seen, weights, place, T } of heads) {
    button.setAttribute("aria-pressed", String(`${place}` === `${state.head}`));
    seen.replaceChildren(weights ? "–" : "off");
    if (weights && state.token > 0) {
      const [column, weight] = mostSeen(weights, chosenRow(), T);
      if (weight > 0) seen.replaceChildren(tokenOf(nameOf(column)), ` ${weight.toFixed(2)}`);
    }
  }
}

/** Draws the weights of a head. If T > largest, a pixel shows the largest weight in its square. */
function drawMatrix(weights, T, largest, chosen) {
  const size = Math.min(T, largest);
  const canvas = make("canvas", { width: size, height: size, "aria-hidden": "true" });
  const [ink, frame] = ["color", "outline-color"].map((name) => rgbOf(name));
  const picture = new ImageData(size, size);
  for (let row = 0; row < T; row++) {
    const y = Math.floor(row * size / T);
    for (let column = 0; column < T; column++) {
      const at = 4 * (y * size + Math.floor(column * size / T));
      const alpha = Math.round(255 * Math.sqrt(weights(row, column)));  // also shows small weights
      if (alpha >= picture.data[at + 3]) picture.data.set([...(row === chosen ? frame : ink), alpha], at);
    }
  }
  canvas.getContext("2d").putImageData(picture, 0, 0);
  return canvas;
}

/** Returns a colour as [red, green, blue]. page.css sets the colours of the page on the slider. */
function rgbOf(name) {
  return getComputedStyle(byId("slider")).getPropertyValue(name).match(/\d+/g).slice(0, 3).map(Number);
}

/** Shows the chosen head: the text coloured by its weights, and its picture. */
function drawHead() {
  const [run, c, head] = state.head;
  const call = shown.looks[run]?.calls?.[c];
  const weights = call?.heads?.[head];
  byId("head").hidden = weights === undefined;
  if (weights === undefined) return;
  const { T } = shown.looks[run];
  headText.title.textContent = `${data.runs.length > 1 ? `${names[run]}, ` : ""}block ${call.block}, head ${head + 1}`;
  headText.line.replaceChildren(...describeRow(weights, T));
  const isRead = weights && state.token > 0;
  // The square root also shows small weights.
  colour(headText.text, (i) => (isRead && i < T ? Math.sqrt(weights(chosenRow(), i)) : 0));
  headText.picture.replaceChildren(...(weights ? [addAxes(drawMatrix(weights, T, 512, chosenRow()), T)] : []));
}

const MOST_LABELS = 64;  // of an axis

/** Puts the tokens on the axes of the picture of a head. If T > MOST_LABELS, labels every nth token. */
function addAxes(canvas, T) {
  const step = Math.ceil(T / MOST_LABELS);
  const labelled = Array.from({ length: Math.ceil(T / step) }, (_, i) => i * step);
  const names = labelled.map((i) => inToken(nameOf(i)).slice(0, 8));
  const longest = Math.max(...names.map((name) => name.length));
  const makeAxis = (className, edge) => make("div", { className }, labelled.map((i, k) => {
    const label = make("span", { text: names[k], className: i === chosenRow() ? "here" : "" });
    label.style[edge] = `${100 * (i + 0.5) / T}%`;
    return label;
  }));
  const rows = makeAxis("axis", "top");
  const columns = makeAxis(longest > 1 ? "axis below" : "axis below letters", "left");
  const style = `--n: ${labelled.length}; --longest: ${longest}`;
  return make("div", { className: "matrix", style, "aria-hidden": "true" }, [rows, canvas, columns]);
}

/** Makes a sentence with the largest weights in the prediction of the chosen token. */
function describeRow(weights, T) {
  if (!weights) return ["This head is off."];
  if (state.token === 0) return [NOT_PREDICTED];
  const columns = Array.from({ length: T }, (_, column) => [weights(chosenRow(), column), column]);
  columns.sort((a, b) => b[0] - a[0]);
  const largest = columns.slice(0, 5).filter(([weight]) => weight > 0);
  const from = `At token ${chosenRow()}, where the model predicts token ${state.token}, `;
  if (!largest.length) return [from, "this head attends to no token."];
  return [from, "the largest weights are: ", ...largest.map(([weight, i]) =>
    make("span", { className: "weight" }, [`${weight.toFixed(3)} `, ...describe(i)]))];
}

/** Shows where the two runs differ. */
function drawDifference() {
  if (data.runs.length < 2) return;
  const [a, b] = shown.looks.map((look) => look.prediction.losses);
  const counted = countedTokens();
  const differences = Array.from(b, (loss, i) => loss - a[i]);
  const sum = counted.reduce((x, i) => x + differences[i - 1], 0);
  byId("sum").textContent = `Loss of ${names[1]} minus loss of ${names[0]}: `
    + `${sum.toFixed(4)} nats over the ${data.counted ? "responses" : "text"}, `
    + `${(sum / counted.length).toFixed(4)} per token.`;
  colour(differenceText, (i) => (isCounted(i) ? differences[i - 1] / WIDEST : 0));
  const size = (i) => Math.abs(differences[i - 1]);
  const order = [...counted].sort((i, j) => size(j) - size(i));
  const rows = order.slice(0, 20).map((i) => [
    differences[i - 1].toFixed(4), contextOf(i), a[i - 1].toFixed(4), b[i - 1].toFixed(4),
  ]);
  byId("largest").replaceChildren(...makeTable(["difference", "token", ...names], rows).children);
}

/** Makes a button with a token and its context, which chooses the token. */
function contextOf(i) {
  const before = onOneLine(shown.tokens.slice(Math.max(1, i - 16), i).join("")).slice(-16);
  const after = onOneLine(shown.tokens.slice(i + 1, i + 17).join("")).slice(0, 16);
  const parts = [make("span", { className: "before", text: before }), tokenOf(nameOf(i)), after];
  const button = make("button", {}, parts);
  button.addEventListener("click", () => choose({ token: i }));
  return button;
}

function drawChecks() {
  const errors = shown.looks.filter((look) => look.error !== null).map((look) => look.error.toExponential(1));
  const checked = errors.length
    ? "The attention weights are computed from the arguments of F.scaled_dot_product_attention: for each "
      + "head, softmax(qkᵀ)·v was compared with the result of the call. The largest relative difference "
      + `is ${errors.join(" and ")}. Attention weights are stored in 8 bits.`
    : "";
  byId("checks").textContent = `Losses are in nats. Probabilities are for a temperature of 1. ${checked}`;
}

// ---- arcs --------------------------------------------------------------------------------------

const MOST_HEADS = 8;  // heads whose arcs are drawn; page.css contains as many colours
const MOST_ARCS = 3;  // arcs of a head
const LEAST_WEIGHT = 0.1;  // smallest weight of an arc, except for the first arc of a head

/** Makes an element of an SVG picture. */
function makeSvg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Makes a text with arcs above it. */
function makeTextWithArcs(label) {
  const element = makeText(label);
  const svg = makeSvg("svg", { "aria-hidden": "true" });
  const list = make("div");
  arcs.push({ element, svg, list });
  new ResizeObserver(drawArcs).observe(element);
  return make("div", { className: "arcs" }, [element, svg]);
}

/** Returns which tokens each head attends to when the model predicts the chosen token. The largest weight comes first.
 *
 * A head is {place, name, colour, arcs: [[column, weight], ...]}. */
function findArcs({ calls, T }, run) {
  const found = [];
  for (const [c, call] of (calls ?? []).entries()) {
    for (const [head, weights] of (call.heads ?? []).entries()) {
      if (!weights) continue;
      const columns = Array.from({ length: T }, (_, column) => [column, weights(chosenRow(), column)]);
      columns.sort((a, b) => b[1] - a[1]);
      found.push({
        place: [run, c, head],
        name: `block ${call.block}, head ${head + 1}`,
        colour: ((call.block - 1) * call.heads.length + head) % MOST_HEADS,  // even if a block is off
        arcs: columns.slice(0, MOST_ARCS).filter(([, weight], i) => weight >= (i ? LEAST_WEIGHT : 1e-9)),
      });
    }
  }
  const seeing = found.filter((head) => head.arcs.length > 0);  // a mask may hide all tokens
  return seeing.sort((a, b) => b.arcs[0][1] - a.arcs[0][1]).slice(0, MOST_HEADS);
}

/** Draws arcs from the token before the chosen token, and lists the tokens to which they lead. */
function drawArcs() {
  for (const [run, { element, svg, list }] of arcs.entries()) {
    const look = shown.looks[run];
    const found = state.token > 0 ? findArcs(look, run) : [];
    const places = placesOf(element, svg);
    const paths = found.map((head, i) => head.arcs.map((arc) => makeArc(arc, head.colour, i / found.length, places)));
    svg.replaceChildren(...paths.flat());
    const title = found.length
      ? ["The model predicts ", ...describe(state.token), " at ", ...describe(chosenRow()),
        ". There, the heads attend to these tokens. The largest weight comes first:"]
      : [state.token > 0 ? "No head with arcs is on." : NOT_PREDICTED];
    const buttons = found.map((head, i) => makeArcButton(head, paths[i]));
    list.hidden = !look.calls;
    list.replaceChildren(make("p", {}, title), ...buttons);
  }
}

/** Returns where arcs may be, in the coordinates of svg: {middles, room, right}.
 *
 * middles: the middle of the upper edge of each token, (x, y). room: the height between two lines of
 * the text. right: x of the right edge. */
function placesOf(element, svg) {
  const box = svg.getBoundingClientRect();
  const rects = spansOf(element).map((span) => span.getClientRects()[0]);
  const lineHeight = parseFloat(getComputedStyle(element).lineHeight);
  return {
    middles: rects.map(({ left, width, top }) => [left + width / 2 - box.left, top - box.top]),
    room: lineHeight - Math.max(...rects.map(({ height }) => height)),
    right: box.width,
  };
}

/** Makes an arc. depth: from 0 to 1, so that arcs of different heads have different heights.
 *
 * An arc stays between two lines of the text, so it crosses no letters. If its tokens are on
 * different lines, the arc continues from the right edge of the upper line to the left edge of the
 * lower line. places: the result of placesOf. */
function makeArc([column, weight], colour, depth, { middles, room, right }) {
  const [[x1, y1], [x2, y2]] = [middles[chosenRow()], middles[column]];
  const height = (room - 3) * (1 - 0.6 * depth);  // 3 px are for the width of the curve
  let d;
  if (Math.abs(y1 - y2) > room) {
    const [edge1, edge2] = y1 > y2 ? [0, right] : [right, 0];
    d = `M ${x1} ${y1} Q ${x1} ${y1 - height}, ${edge1} ${y1 - height} `
      + `M ${x2} ${y2} Q ${x2} ${y2 - height}, ${edge2} ${y2 - height}`;
  } else {
    const turn = column === chosenRow() ? 12 : 0;  // a loop if a token attends to itself
    const share = Math.min(1, 0.55 + Math.abs(x1 - x2) / 200);  // a longer arc is higher
    const control = height * share / 0.75;  // the curve reaches 3/4 of the height of its control points
    d = `M ${x1} ${y1} C ${x1 + turn} ${y1 - control}, ${x2 - turn} ${y2 - control}, ${x2} ${y2}`;
  }
  return makeSvg("path", { d, class: `arc${colour}`, "stroke-width": 1 + 3 * weight });
}

/** Makes a line of the list. A click chooses the head, and the pointer shows its arcs. */
function makeArcButton({ place, name, colour, arcs: found }, paths) {
  const sample = makeSvg("svg", { viewBox: "0 0 24 6", width: 24, height: 6 });
  sample.append(makeSvg("path", { d: "M 0 3 H 24", class: `arc${colour}`, "stroke-width": 3 }));
  const parts = found.flatMap(([column, weight]) => [tokenOf(nameOf(column)), ` ${weight.toFixed(2)} `]);
  const button = make("button", {}, [sample, ` ${name} `, ...parts]);
  button.addEventListener("click", () => choose({ head: place }));
  for (const [event, isPointed] of [["pointerenter", true], ["pointerleave", false]]) {
    button.addEventListener(event, () => paths.forEach((path) => path.classList.toggle("pointed", isPointed)));
  }
  return button;
}

// ---- what is chosen ----------------------------------------------------------------------------

function drawToken() {
  for (const element of texts) {
    spansOf(element).forEach((span, i) => span.setAttribute("aria-selected", String(i === state.token)));
  }
  drawCard(state.token);
  drawArcs();
  drawBlocks();
  markHeads();
  drawHead();
}

function drawAll() {
  shown = play && state.snapshot === LAST ? play.shown() : recorded(data.snapshots[state.snapshot]);
  state.token = Math.min(state.token, shown.tokens.length - 1);
  fillTexts();
  drawFacts();
  drawSnapshot();
  drawLosses();
  drawDifference();
  drawAttention();
  drawToken();
  drawChecks();
  if (play) drawPlay();
}

/** Chooses a token, a snapshot or a head, and writes the choice into the address. */
function choose(change) {
  Object.assign(state, change);
  const address = new URLSearchParams({ token: state.token, snapshot: state.snapshot, head: state.head.join(".") });
  history.replaceState(null, "", `#${address}`);
  if ("snapshot" in change) drawAll();
  else drawToken();
}

/** Reads the choice from the address. Ignores values that do not exist in this page. */
function readAddress() {
  const address = new URLSearchParams(location.hash.slice(1));
  const token = Number(address.get("token") ?? NaN);
  const snapshot = Number(address.get("snapshot") ?? NaN);
  const head = (address.get("head") ?? "").split(".").map(Number);
  if (Number.isInteger(token) && token >= 0 && token < shown.tokens.length) state.token = token;
  if (data.snapshots[snapshot]) state.snapshot = snapshot;
  if (head.length === 3 && head.every(Number.isInteger)) state.head = head;
}

shown = recorded(data.snapshots[LAST]);
readAddress();
byId("texts").append(...sides((look, run) => makeTextWithArcs(`the text, losses of ${names[run]}`)));
byId("looks").append(...sides((look, run) => arcs[run].list));
const differenceText = makeText("the text, differences");
byId("differences").append(differenceText);
const headText = {
  title: make("h3"),
  line: make("p"),
  text: makeText("the text, attention"),
  picture: make("div", { className: "wide" }),
};
const caption = make("p", {
  className: "quiet",
  text: "Each row is a token that attends, and each column a token that it attends to. On the diagonal, a token "
    + "attends to itself; to the left of the diagonal, it attends to the previous token.",
});
byId("head").append(headText.title, headText.line, headText.text, headText.picture, caption);
byId("compare").hidden = data.runs.length < 2;
byId("outlined").hidden = !data.counted;
byId("slider").max = LAST;
byId("snapshots").hidden = data.snapshots.length < 2;
byId("slider").addEventListener("input", (event) => choose({ snapshot: Number(event.target.value) }));
byId("guess").textContent = `${GUESS.toFixed(2)} = ln ${data.vocabulary}: a uniform guess among ${data.vocabulary} tokens`;
byId("first").textContent = `${names[1]} is better by ${WIDEST} nats`;
byId("second").textContent = `${names[0]} is better by ${WIDEST} nats`;
addEventListener("hashchange", () => { readAddress(); drawAll(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
