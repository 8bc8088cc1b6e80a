// The page of a Sidestream server: chat, and live figures of the engine. The model's text is only inserted as text.

const ROOT = document.documentElement.dataset.root;
const $ = (id) => document.getElementById(id);
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** A new element with a class and text. */
function make(tag, kind = "", text = "") {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text) made.textContent = text;
  return made;
}

// ---------------------------------------------------------------- numbers

const whole = new Intl.NumberFormat("en");
const count = (value) => (value < 1e6 ? whole.format(Math.round(value)) : `${(value / 1e6).toPrecision(3)} M`);
const plural = (value, one) => `${count(value)} ${one}${Math.round(value) === 1 ? "" : "s"}`;

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) [value, at] = [value / 1024, at + 1];
  return `${value < 10 && at ? value.toFixed(1) : Math.round(value)}\u00a0${units[at]}`;
}

function seconds(value) {
  const [number, unit] =
    value < 0.001
      ? [Math.round(value * 1e6), "µs"]
      : value < 0.1
        ? [(value * 1e3).toFixed(1), "ms"]
        : value < 1
          ? [Math.round(value * 1e3), "ms"]
          : value < 120
            ? [value.toFixed(1), "s"]
            : value < 7200
              ? [(value / 60).toFixed(1), "min"]
              : [(value / 3600).toFixed(1), "h"];
  return `${number}\u00a0${unit}`;
}

/** Writes a value with its unit in small letters; null: a dash. */
function show(id, value, format) {
  const [number, ...unit] = value === null ? ["–"] : format(value).split("\u00a0");
  $(id).replaceChildren(number, ...(unit.length ? [make("small", "", unit.join(" "))] : []));
}

// ---------------------------------------------------------------- key and requests

let key = sessionStorage.getItem("sidestream.key") ?? "";
let keyAsked = null;

const headers = () => (key ? { authorization: `Bearer ${key}` } : {});

/** Asks for the key once, however many requests need it. True if there is a new one. */
function askKey() {
  keyAsked ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    $("key-wrong").hidden = !key;
    $("key-value").value = "";
    dialog.onclose = () => {
      const given = dialog.returnValue === "use" && $("key-value").value.trim();
      if (given) sessionStorage.setItem("sidestream.key", (key = given));
      keyAsked = null;
      resolve(Boolean(given));
    };
    dialog.returnValue = "";
    dialog.showModal();
  });
  return keyAsked;
}

async function errorOf(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `the server answered with status ${reply.status}`;
  }
}

/** The data of each server-sent event of a reply. */
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// ---------------------------------------------------------------- conversations

const PREFIX = "sidestream.chat.";
const MOST = 100;
const chats = new Map();
let current = null;

function loadChats() {
  chats.clear();
  for (let at = 0; at < localStorage.length; at++) {
    const name = localStorage.key(at);
    if (!name.startsWith(PREFIX)) continue;
    try {
      const chat = JSON.parse(localStorage.getItem(name));
      if (Array.isArray(chat.messages)) chats.set(chat.id, chat);
    } catch {
      localStorage.removeItem(name);
    }
  }
}

const byAge = () => [...chats.values()].sort((one, other) => other.at - one.at);

function save(chat) {
  chat.at = Date.now();
  chats.set(chat.id, chat);
  for (const old of byAge().slice(MOST)) drop(old);
  while (true) {
    try {
      localStorage.setItem(
        PREFIX + chat.id,
        JSON.stringify(chat, (name, value) => (name === "stop" ? undefined : value)),
      );
      return;
    } catch {
      const oldest = byAge().at(-1); // the browser's room is full
      if (oldest === chat) return;
      drop(oldest);
    }
  }
}

function drop(chat) {
  chat.stop?.abort();
  chats.delete(chat.id);
  localStorage.removeItem(PREFIX + chat.id);
}

function newChat() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "", at: Date.now(), messages: [] };
}

function listChats() {
  const rows = byAge().map((chat) => {
    const row = make("li"),
      open = make("button", "", chat.title),
      remove = make("button", "drop", "✕");
    open.title = chat.title;
    remove.setAttribute("aria-label", `Delete “${chat.title}”`);
    if (chat === current) row.setAttribute("aria-current", "true");
    open.onclick = () => view("chat") ?? openChat(chat);
    remove.onclick = () => {
      if (!confirm(`Delete “${chat.title}”?`)) return;
      drop(chat);
      if (chat === current) openChat(byAge()[0] ?? newChat());
      else listChats();
      $("new").focus();
    };
    row.append(open, remove);
    return row;
  });
  $("list")
    .querySelector("ul")
    .replaceChildren(...rows);
}

function openChat(chat) {
  current = chat;
  const box = $("messages");
  box.replaceChildren(...chat.messages.map(showMessage));
  if (!chat.messages.length) {
    const empty = make("div", "empty");
    empty.append(make("strong", "", "Ask the model something"));
    empty.append(
      "Each answer shows where the KV of its prompt came from. Ask again in the same conversation, and the earlier " +
        "part is not computed twice.",
    );
    box.append(empty);
  }
  box.scrollTop = box.scrollHeight;
  toggleList(false);
  listChats();
  showSend();
}

function toggleList(open) {
  $("list").classList.toggle("open", open);
  $("open-list").setAttribute("aria-expanded", String(open));
}

// ---------------------------------------------------------------- messages

function showMessage(message) {
  const box = make("div", `message ${message.role}`);
  box.append(make("div", "text", message.content));
  if (message.role === "assistant") {
    box.setAttribute("aria-live", "polite");
    finishMessage(box, message);
  }
  return box;
}

/** Puts error and source of the prompt's KV below an answer. */
function finishMessage(box, message) {
  box.setAttribute("aria-busy", "false");
  box.querySelectorAll(".source, .error").forEach((old) => old.remove());
  if (message.error) box.append(make("p", "error", message.error));
  if (message.facts) box.append(source(message.facts));
}

const tierClass = (tier) => (["device", "host", "disk"].includes(tier) ? tier : "other");
const FROM = { device: "the device", host: "host memory", disk: "disk" };

/** Where the prompt's KV came from, as a bar and words. */
function source(facts) {
  const box = make("div", "source"),
    words = make("div");
  const cached = Object.entries(facts.cached).filter(([, tokens]) => tokens);
  const total = cached.reduce((sum, [, tokens]) => sum + tokens, 0);
  const shape = bar([...cached.map(([tier, tokens]) => [tierClass(tier), tokens]), ["rest", facts.prompt - total]]);
  shape.setAttribute("aria-hidden", "true");
  const found = cached.map(([tier, tokens]) => `${count(tokens)} from ${FROM[tier] ?? tier}`);
  words.append(make("b", "", plural(facts.prompt, "prompt token")), ": ");
  words.append([...found, `${count(facts.prompt - total)} computed`].join(", "), ". ");
  if (total) {
    const saved = `Saved ${plural(total, "token")} of prefill`;
    words.append(make("b", "", facts.rate ? `${saved}, about ${seconds(total / facts.rate)}` : saved), ". ");
  }
  if (facts.first)
    words.append(
      `First token after ${seconds(facts.first)}, ${plural(facts.output, "token")} in ${seconds(facts.all)}.`,
    );
  box.append(shape, words);
  return box;
}

const busy = () => Boolean(current.stop);

function showSend() {
  $("send").textContent = busy() ? "Stop" : "Send";
}

let model = "";

/** The served model's name. */
async function modelName() {
  if (!model) model = (await (await request("/v1/models")).json()).data[0].id;
  return model;
}

/** A request with the key; asks for the key if it is needed. Throws an error with the server's message. */
async function request(path, options = {}) {
  for (;;) {
    const reply = await fetch(ROOT + path, { ...options, headers: { ...options.headers, ...headers() } });
    if (reply.ok) return reply;
    if (reply.status !== 401 || !(await askKey())) throw new Error(await errorOf(reply));
  }
}

async function ask(chat, question) {
  const answer = { role: "assistant", content: "" };
  const failed = (message, at) => !message.content || (message.role === "user" && !chat.messages[at + 1]?.content);
  const sent = chat.messages
    .filter((message, at) => !failed(message, at))
    .map(({ role, content }) => ({ role, content }));
  const system = $("system").value.trim();
  if (!chat.title) chat.title = question.slice(0, 80);
  chat.messages.push({ role: "user", content: question }, answer);
  chat.stop = new AbortController();
  save(chat);
  openChat(chat);
  const box = $("messages").lastElementChild;
  box.setAttribute("aria-busy", "true");
  const began = performance.now(),
    facts = {};
  try {
    const reply = await request("/v1/chat/completions", {
      method: "POST",
      signal: chat.stop.signal,
      headers: { "content-type": "application/json" },
      body: JSON.stringify({
        model: await modelName(),
        messages: [
          ...(system ? [{ role: "system", content: system }] : []),
          ...sent,
          { role: "user", content: question },
        ],
        stream: true,
        stream_options: { include_usage: true },
        ...($("max-tokens").value ? { max_tokens: Number($("max-tokens").value) } : {}),
        ...($("temperature").value ? { temperature: Number($("temperature").value) } : {}),
      }),
    });
    for await (const data of events(reply)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const text = chunk.choices?.[0]?.delta?.content;
      if (text) {
        facts.first ??= (performance.now() - began) / 1e3;
        answer.content += text;
        append(chat, box, text);
      }
      if (chunk.usage) usage(answer, facts, chunk.usage, (performance.now() - began) / 1e3);
    }
  } catch (error) {
    if (error.name === "AbortError") answer.error = "Stopped.";
    else if (error instanceof TypeError)
      answer.error = "The connection to the server was lost. Send the question again.";
    else answer.error = error.message;
    model = "";
  }
  chat.stop = null;
  if (chats.has(chat.id)) save(chat);
  finishMessage(box, answer);
  if (chat === current) {
    if (!box.isConnected) openChat(chat);
    follow();
    showSend();
  }
  listChats();
}

function usage(answer, facts, found, all) {
  const details = found.prompt_tokens_details ?? {};
  const cached = details.cached_tokens_by_tier ?? { device: details.cached_tokens ?? 0 };
  answer.facts = {
    ...facts,
    prompt: found.prompt_tokens,
    output: found.completion_tokens,
    cached,
    all,
    rate: lastSample?.prefill_tokens_per_s,
  };
}

/** Adds text to an answer, and scrolls if the reader is at the end. */
function append(chat, box, text) {
  const shown = chat === current && !box.isConnected ? $("messages").lastElementChild : box;
  const atEnd = nearEnd();
  shown.querySelector(".text").append(text);
  if (chat === current && atEnd) follow();
}

function nearEnd() {
  const box = $("messages");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 80;
}

function follow() {
  $("messages").scrollTop = $("messages").scrollHeight;
}

// ---------------------------------------------------------------- live figures

let lastSample = null;
let watching = null;

function status(state, text, detail = "") {
  $("status").dataset.state = state;
  if ($("status").textContent !== text) $("status").textContent = text;
  $("live").toggleAttribute("data-stale", state === "bad");
  $("offline").hidden = state !== "bad";
  if ($("offline").textContent !== detail) $("offline").textContent = detail;
}

const pause = (milliseconds, signal) =>
  new Promise((resolve) => {
    setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", resolve, { once: true });
  });

/** Follows the stream, and connects again when it ends, until `signal`. */
async function watch(signal) {
  let wait = 500;
  while (!signal.aborted) {
    const quiet = new AbortController();
    let timer = 0,
      again = "The server does not answer. Trying again.";
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => quiet.abort(), 10_000);
    };
    alive();
    try {
      const reply = await fetch(`${ROOT}/metrics/stream`, {
        headers: headers(),
        signal: AbortSignal.any([signal, quiet.signal]),
      });
      if (reply.status === 401) {
        $("key").hidden = false;
        status("bad", "API key needed", "The figures need the server’s API key.");
        if (!(await askKey())) return;
        continue;
      }
      if (!reply.ok) {
        again = await errorOf(reply);
        wait = Math.max(wait, 5000);
      } else
        for await (const data of events(reply)) {
          const sample = JSON.parse(data);
          if (sample.error) {
            again = sample.error.message;
            break;
          }
          alive();
          wait = 500;
          take(sample);
        }
    } catch {
      // The server ended, or cannot be reached.
    } finally {
      clearTimeout(timer);
    }
    if (signal.aborted) return;
    status("bad", "Not connected", again);
    await pause(wait, signal);
    wait = Math.min(wait * 1.6, 5000);
  }
}

function startWatching() {
  watching?.abort();
  watching = new AbortController();
  watch(watching.signal);
}

function take(sample) {
  const { health } = sample;
  model = sample.model;
  $("key").hidden = true;
  $("model").textContent = sample.replica ? `${model} on ${sample.replica}` : model;
  if (health.status !== "ok")
    status("bad", `Engine ${health.status}`, health.detail || `The engine is ${health.status}.`);
  else if (sample.age_s > 2)
    status("bad", "Engine silent", `The engine does not answer: figures of ${seconds(sample.age_s)} ago.`);
  else status("ok", health.paused ? "Paused" : "Connected");
  if (!sample.timeline) return;
  lastSample = sample;
  timeline.add(sample.timeline);
  figures(sample);
}

const kept = {}; // the last known mean, for figures that are rare

function figures(sample) {
  const { last, requests, saved } = sample;
  for (const name of ["ttft_seconds", "itl_seconds", "step_seconds"])
    kept[name] = last[name] ?? kept[name] ?? sample.mean[name];
  show("running", requests.running, count);
  show("waiting", requests.waiting, count);
  show("rate", last.output_tokens_per_s, (value) => `${value < 10 ? value.toFixed(1) : count(value)}\u00a0tok/s`);
  show("ttft", kept.ttft_seconds, seconds);
  show("itl", kept.itl_seconds, seconds);
  show("saved-tokens", saved.tokens, count);
  show("saved-bytes", saved.bytes, bytes);
  show("saved-seconds", saved.seconds, seconds);
  tiers(sample);
  step(sample);
  drafts(sample);
}

function bar(parts) {
  const box = make("div", "bar");
  for (const [kind, share] of parts.filter(([, share]) => share > 0)) {
    const part = make("i", kind);
    part.style.flexGrow = share;
    box.append(part);
  }
  return box;
}

function tiers({ device, tiers: others, tokens, transfers }) {
  const { used, cached, free } = device.blocks;
  const all = used + cached + free;
  const rows = [
    tier(
      "device",
      `${bytes(all ? (device.bytes * (used + cached)) / all : 0)} of ${bytes(device.bytes)}`,
      bar([
        ["used", used],
        ["cached", cached],
        ["rest", free],
      ]),
      `${count(used)} in use, ${count(cached)} to reuse, ${plural(free, "free block")}`,
      tokens,
    ),
  ];
  for (const [name, found] of Object.entries(others)) {
    const room = found.room_bytes;
    rows.push(
      tier(
        name,
        room ? `${bytes(found.bytes)} of ${bytes(room)}` : bytes(found.bytes),
        room
          ? bar([
              [tierClass(name), found.bytes],
              ["rest", Math.max(0, room - found.bytes)],
            ])
          : null,
        plural(found.blocks, "block") +
          (found.works === false ? "; the last write failed" : "") +
          (found.turned_down ? "; turned down, because its loads lost time" : "") +
          (found.saved_s == null ? "" : `; saved ${seconds(found.saved_s)}, lost ${seconds(found.lost_s ?? 0)}`),
        tokens,
      ),
    );
  }
  if (rows.length === 1) {
    const row = make("li");
    row.append(make("p", "note", "There is no other tier: --offload-host adds host memory, --offload-disk a disk."));
    rows.push(row);
  }
  const moved = [
    ["store", "stored"],
    ["load", "loaded"],
    ["disk-write", "written"],
    ["disk-read", "read"],
  ]
    .filter(([kind]) => transfers[kind]?.bytes)
    .map(([kind, word]) => `${bytes(transfers[kind].bytes)} ${word}`);
  if (moved.length) {
    const row = make("li");
    row.append(make("p", "note", `Moved: ${moved.join(", ")}.`));
    rows.push(row);
  }
  $("tiers").replaceChildren(...rows);
}

const NAMES = { device: "Device", host: "Host memory", disk: "Disk" };

function tier(name, size, shape, contents, tokens) {
  const row = make("li", `t-${tierClass(name)}`),
    back = tokens.cached[name] ?? 0;
  row.append(make("span", "name", NAMES[name] ?? name), make("span", "", size));
  if (shape) row.append(shape);
  row.append(make("span", "note", `${contents}. Came back: ${plural(back, "token")}.`));
  return row;
}

const PARTS = [
  ["plan", "Plan and launch", "plan_s"],
  ["waits", "Wait for the device", "wait_s"],
  ["commit", "Commit", "commit_s"],
];

let lastStep = null; // the last known means, because some parts are rare

function step({ engine_thread: thread, last }) {
  const known = Object.entries({ ...thread, draft: last.draft_seconds, verify: last.verify_seconds });
  if (thread.commit_s !== null)
    lastStep = { ...lastStep, ...Object.fromEntries(known.filter(([, value]) => value !== null)) };
  $("step-total").textContent =
    kept.step_seconds === null
      ? "no step yet"
      : `${seconds(kept.step_seconds)}${last.step_seconds === null ? ", idle now" : ""}`;
  if (!lastStep) return;
  const found = PARTS.map(([kind, name, field]) => [kind, name, lastStep[field] ?? 0]);
  const total = found.reduce((sum, [, , value]) => sum + value, 0);
  $("step-bar").replaceChildren(...bar(found.map(([kind, , value]) => [kind, value])).children);
  $("step-parts").replaceChildren(
    ...found.map(([kind, name, value]) => {
      const box = make("div", `s-${kind}`);
      box.append(make("dt", "", name), make("dd", "", seconds(value)));
      return box;
    }),
  );
  const share = total ? Math.round((100 * (total - lastStep.wait_s)) / total) : 0;
  const { draft, verify } = lastStep;
  const also = draft && verify ? ` A step with drafts: ${seconds(draft)} to draft, ${seconds(verify)} to verify.` : "";
  $("step-note").textContent = `The engine thread works for ${share} % of its turn; the rest is its budget.${also}`;
}

function drafts({ drafts: found }) {
  const [name, one] = Object.entries(found).sort(([, a], [, b]) => b.drafted - a.drafted)[0] ?? [];
  if (!one?.accept_length) {
    $("draft-mean").textContent = "";
    $("lengths").replaceChildren();
    $("draft-note").textContent = "No drafts yet. --speculative turns them on.";
    return;
  }
  $("draft-mean").textContent = `accept length ${(one.last_accept_length ?? one.accept_length).toFixed(2)}`;
  const lengths = one.lengths.slice(0, 1 + one.lengths.findLastIndex((rows) => rows));
  const most = Math.max(...lengths);
  $("lengths").replaceChildren(
    ...lengths.map((rows, at) => {
      const box = make("div"),
        column = make("i");
      column.style.height = `${(60 * rows) / most}%`;
      box.append(count(rows), column, String(at + 1));
      return box;
    }),
  );
  $("lengths").setAttribute(
    "aria-label",
    `Rows by accept length: ${lengths.map((rows, at) => `${at + 1}: ${rows}`).join(", ")}`,
  );
  const share = one.drafted ? Math.round((100 * one.accepted) / one.drafted) : 0;
  $("draft-note").textContent =
    `Steps of requests by tokens gained. ${name}: ${share} % of ${count(one.drafted)} drafts accepted.`;
}

// ---------------------------------------------------------------- timeline

const ROW = 30,
  SHOWN_US = 4e6,
  DELAY_US = 4e5;
const TRACKS = [
  ["engine", "engine"],
  ["compute", "compute"],
  ["store", "store"],
  ["load", "load"],
  ["disk-write", "disk"],
  ["disk-read", "disk"],
];

class Timeline {
  constructor(canvas, labels) {
    this.canvas = canvas;
    this.labels = labels;
    this.spans = [];
    this.ends = {};
    this.offset = null; // the server's clock minus ours
    this.tracks = [];
    this.still = null; // the time at which the picture is held
    this.drawn = 0;
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  add({ now_us: now, spans }) {
    const offset = now - performance.now() * 1e3;
    // A restarted server has another clock; a sample that was delayed on its way shows less than the true offset.
    this.offset =
      this.offset === null || Math.abs(offset - this.offset) > 2e6 ? offset : Math.max(offset, this.offset - 500);
    for (const [name, label, start, length] of spans) {
      const track = name.replace(/-\d+$/, ""); // store-0, store-1
      const waits = label.startsWith("wait");
      // On a GPU a span begins when its work was enqueued, often behind other work of its stream.
      const from = waits ? start : Math.max(start, Math.min(this.ends[track] ?? 0, start + length));
      if (!waits) this.ends[track] = start + length;
      this.spans.push({ track, label, waits, from, to: start + length });
    }
    this.spans = this.spans.filter((span) => span.to > now - 2 * SHOWN_US);
    this.setTracks(lastSample.tiers);
    if (calm.matches || document.hidden) this.draw();
  }

  setTracks(tiers) {
    const seen = new Set(this.spans.map((span) => span.track));
    const wanted = TRACKS.filter(
      ([name]) =>
        ["engine", "compute"].includes(name) ||
        seen.has(name) ||
        this.tracks.includes(name) ||
        (["store", "load"].includes(name) && "host" in tiers),
    );
    if (wanted.length === this.tracks.length) return;
    this.tracks = wanted.map(([name]) => name);
    this.labels.replaceChildren(
      ...wanted.map(([name, colour]) => {
        const label = make("li");
        label.style.color = `var(--${colour})`;
        label.append(make("span", "", name.replace("-", " ")));
        return label;
      }),
    );
    this.setColours();
  }

  setColours() {
    const colour = (element, name) => getComputedStyle(element)[name];
    this.colours = Object.fromEntries(
      [...this.labels.children].map((label, at) => [this.tracks[at], colour(label, "color")]),
    );
    this.back = colour(this.canvas.closest("article"), "backgroundColor");
    this.quiet = colour($("span"), "color");
    this.line = colour(this.canvas.closest("article"), "borderTopColor");
    this.wait = colour($("step-bar"), "backgroundColor");
    this.draw();
  }

  now() {
    return this.still ?? performance.now() * 1e3 + this.offset - DELAY_US;
  }

  draw() {
    const { canvas } = this,
      box = canvas.getBoundingClientRect(),
      scale = devicePixelRatio;
    if (this.offset === null || !this.colours || !box.width) return;
    if (canvas.width !== Math.round(box.width * scale) || canvas.height !== Math.round(box.height * scale))
      [canvas.width, canvas.height] = [Math.round(box.width * scale), Math.round(box.height * scale)];
    const pen = canvas.getContext("2d"),
      stop = this.now(),
      start = stop - SHOWN_US;
    const x = (time) => ((time - start) / SHOWN_US) * box.width;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, box.width, box.height);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const bottom = this.tracks.length * ROW;
    for (let second = 0; second <= SHOWN_US / 1e6; second++) {
      const label = second ? `−${second} s` : "now",
        at = box.width - (second / (SHOWN_US / 1e6)) * box.width;
      pen.fillStyle = this.line;
      pen.fillRect(Math.min(at, box.width - 1), 2, 1, bottom);
      pen.fillStyle = this.quiet;
      pen.fillText(label, Math.max(0, Math.min(at - 10, box.width - 24)), bottom + 10);
    }
    for (const span of this.spans) {
      const row = this.tracks.indexOf(span.track);
      if (row < 0 || span.to < start || span.from > stop) continue;
      const left = Math.max(0, x(span.from)),
        width = Math.max(Math.min(x(span.to), box.width) - left, 2);
      pen.fillStyle = span.waits ? this.wait : this.colours[span.track];
      pen.beginPath();
      pen.roundRect(
        left,
        row * ROW + (span.waits ? 13 : 4),
        width > 3 ? width - 0.5 : width,
        span.waits ? 4 : 22,
        !span.waits && width > 6 ? 3 : 0,
      );
      pen.fill();
      if (width > 44 && !span.waits && pen.measureText(span.label).width < width - 8) {
        pen.fillStyle = this.back;
        pen.fillText(span.label, left + 5, row * ROW + 15.5);
      }
    }
  }

  /** The span under a point of the canvas. */
  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const time = this.now() - SHOWN_US + ((event.clientX - box.left) / box.width) * SHOWN_US;
    const track = this.tracks[Math.floor((event.clientY - box.top) / ROW)],
      reach = SHOWN_US / box.width;
    return this.spans.findLast((span) => span.track === track && span.from - reach <= time && time <= span.to + reach);
  }

  frame(at) {
    if (at - this.drawn > 32 && !calm.matches && this.still === null) {
      this.drawn = at;
      this.draw();
    }
    requestAnimationFrame((next) => this.frame(next));
  }
}

const timeline = new Timeline(document.querySelector("canvas"), document.querySelector("#timeline ul"));

// ---------------------------------------------------------------- controls

const THEMES = ["system", "light", "dark"];

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").lastElementChild.textContent = `Theme: ${theme}`;
  $("theme").setAttribute("aria-label", `Theme: ${theme}`);
  localStorage.setItem("sidestream.theme", theme);
  timeline.setColours();
}

/** On a narrow screen, shows the chat or the figures. */
function view(name) {
  document.body.dataset.view = name;
  for (const one of $("views").children) one.setAttribute("aria-pressed", String(one.dataset.to === name));
  timeline.draw();
}

function grow() {
  const box = $("question");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function submit(event) {
  event.preventDefault();
  if (busy()) return void current.stop.abort();
  const question = $("question").value.trim();
  if (!question) return void $("question").focus();
  $("question").value = "";
  grow();
  ask(current, question);
}

$("ask").addEventListener("submit", submit);
$("question").addEventListener("input", grow);
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) busy() ? event.preventDefault() : submit(event);
});
$("new").onclick = () => {
  view("chat");
  openChat(current.messages.length ? newChat() : current);
  $("question").focus();
};
$("open-list").onclick = () => toggleList(!$("list").classList.contains("open"));
document.addEventListener("keydown", (event) => event.key === "Escape" && toggleList(false));
document.querySelector("main").addEventListener("pointerdown", () => toggleList(false));
$("live").addEventListener("pointerdown", () => toggleList(false));
$("theme").onclick = () => setTheme(THEMES[(THEMES.indexOf(localStorage.getItem("sidestream.theme")) + 1) % 3]);
$("key-cancel").onclick = () => $("key-dialog").close();
$("key").onclick = async () => (await askKey()) && startWatching();
$("pause").onclick = () => {
  timeline.still = timeline.still === null && timeline.offset !== null ? timeline.now() : null;
  $("pause").setAttribute("aria-pressed", String(timeline.still !== null));
  $("pause").textContent = timeline.still === null ? "Pause" : "Go on";
};
for (const button of $("views").children) button.onclick = () => view(button.dataset.to);
timeline.canvas.addEventListener("pointermove", (event) => {
  const span = timeline.offset === null ? undefined : timeline.at(event);
  if (span) $("span").textContent = `${span.track}: ${span.label}, ${seconds((span.to - span.from) / 1e6)}`;
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => timeline.setColours());
window.addEventListener("storage", (event) => {
  if (!event.key?.startsWith(PREFIX) || busy()) return;
  loadChats();
  if (chats.has(current.id)) openChat(chats.get(current.id));
  else listChats();
});
document.addEventListener("visibilitychange", () => (document.hidden ? watching?.abort() : startWatching()));

loadChats();
setTheme(
  THEMES.includes(localStorage.getItem("sidestream.theme")) ? localStorage.getItem("sidestream.theme") : "system",
);
openChat(byAge()[0] ?? newChat());
startWatching();
timeline.frame(0);
