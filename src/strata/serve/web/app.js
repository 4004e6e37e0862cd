// The page: chat over /v1/chat/completions, the status line, theme and views.

import { copyText, element, render } from "./markdown.js";
import { show } from "./monitor.js";

const at = (id) => document.getElementById(id);
const messages = []; // {role, content, reasoning?}
let running = null; // AbortController of the answer in progress
let modelName = "";
let key = sessionStorage.getItem("strata-key") ?? "";

function ask(path, options = {}) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  return fetch(path, { ...options, headers, cache: "no-store" });
}

async function reason(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? JSON.stringify(body);
  } catch {
    return `the server answered ${response.status}`;
  }
}

// --- status line and monitor

function state(kind, words) {
  const line = at("state");
  if (line.dataset.state !== kind || line.textContent !== words) {
    line.dataset.state = kind;
    line.textContent = words;
  }
}

function needKey(needed) {
  at("key-form").hidden = !needed;
  if (needed) state("wait", "a key is needed");
}

async function look() {
  if (document.hidden) return;
  try {
    const response = await ask("/v1/status");
    if (response.status === 401) return needKey(true);
    if (!response.ok) return state("fault", await reason(response));
    const status = await response.json();
    needKey(false);
    modelName = status.model?.id ?? modelName;
    at("model").textContent = modelName;
    if (status.ready) state("ready", status.queue?.running ? "working" : "ready");
    else state(status.last_fault ? "fault" : "wait", `${status.phase ?? "loading"} ${Math.round(100 * (status.progress ?? 0))} %${status.last_fault ? `: ${status.last_fault}` : ""}`);
    show(status);
  } catch {
    state("fault", "no connection");
  }
}

// --- one answer on the page

class AnswerView {
  constructor() {
    this.text = element("div", { className: "text caret" });
    this.thoughtText = element("div");
    this.thoughtHead = element("summary", {}, "Thinking…");
    this.thought = element("details", { className: "thought", hidden: true }, this.thoughtHead, this.thoughtText);
    this.under = element("div", { className: "under" });
    this.node = element("li", { className: "assistant" }, this.thought, this.text, this.under);
    this.content = "";
    this.reasoning = "";
    this.drawn = false;
    this.began = performance.now();
  }

  add(delta) {
    const thinking = delta.reasoning_content ?? delta.reasoning;
    if (thinking) {
      this.reasoning += thinking;
      this.thought.hidden = false;
    }
    if (delta.content) {
      if (!this.content && this.reasoning) this.thoughtDone();
      this.content += delta.content;
    }
    if (!this.drawn) {
      this.drawn = true;
      requestAnimationFrame(() => this.draw());
    }
  }

  thoughtDone() {
    this.thoughtHead.textContent = `Thought for ${((performance.now() - this.began) / 1000).toFixed(1)} s`;
  }

  draw() {
    this.drawn = false;
    const log = at("log");
    const stick = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    this.thoughtText.textContent = this.reasoning;
    render(this.text, this.content);
    if (stick) log.scrollTop = log.scrollHeight;
  }

  end(note, error) {
    this.draw();
    this.text.classList.remove("caret");
    if (this.reasoning && !this.content) this.thoughtDone();
    if (error) this.node.insertBefore(element("p", { className: "error", role: "alert" }, error), this.under);
    const copy = element("button", { type: "button", className: "quiet" }, "Copy");
    copy.addEventListener("click", () => copyText(this.content, copy));
    const again = element("button", { type: "button", className: "quiet again" }, "Regenerate");
    again.addEventListener("click", regenerate);
    document.querySelectorAll(".again").forEach((old) => old.remove());
    this.under.replaceChildren(copy, again, element("span", { className: "note" }, note));
    const log = at("log");
    log.scrollTop = log.scrollHeight;
  }
}

function request() {
  const system = at("system").value.trim();
  const body = {
    model: modelName,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (at("temperature").value !== "") body.temperature = Number(at("temperature").value);
  if (at("limit").value !== "") body.max_completion_tokens = Number(at("limit").value);
  if (at("effort").value) body.reasoning_effort = at("effort").value;
  return body;
}

async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    held += decoder.decode(value ?? new Uint8Array(), { stream: !done });
    const parts = held.split(/\r?\n\r?\n/);
    held = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
    if (done) return;
  }
}

function noteOf(usage, seconds, finish) {
  const parts = [];
  if (usage) {
    parts.push(`${usage.completion_tokens} tokens`);
    if (seconds > 0.05 && usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
    const reused = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`prompt ${usage.prompt_tokens}${reused ? `, ${reused} reused` : ""}`);
  }
  if (finish === "length") parts.push("cut at the limit");
  if (finish === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

async function answer() {
  const view = new AnswerView();
  at("log").append(view.node);
  view.node.scrollIntoView({ block: "end" });
  busy(true);
  const own = new AbortController();
  running = own;
  let usage = null, finish = "", error = "", first = 0;
  try {
    const response = await ask("/v1/chat/completions", { method: "POST", body: JSON.stringify(request()), signal: own.signal });
    if (response.status === 401) needKey(true);
    if (!response.ok) throw new Error(await reason(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message ?? String(event.error));
      usage = event.usage ?? usage;
      for (const choice of event.choices ?? []) {
        if (choice.delta) view.add(choice.delta);
        if (!first && (choice.delta?.content || choice.delta?.reasoning_content)) first = performance.now();
        finish = choice.finish_reason ?? finish;
      }
    }
    if (!finish) error = "the connection ended before the answer did";
  } catch (problem) {
    if (problem.name === "AbortError") finish = "stopped";
    else error = problem.message || "the connection broke";
  }
  if (running === own) {
    running = null;
    busy(false);
    if (view.content || view.reasoning) messages.push({ role: "assistant", content: view.content });
    view.end(noteOf(usage, first ? (performance.now() - first) / 1000 : 0, finish), error);
    at("said").textContent = error ? `The answer failed: ${error}` : finish === "stopped" ? "Stopped." : `Answer: ${view.content}`;
    at("prompt").focus();
  }
}

function busy(now) {
  at("send").hidden = now;
  at("stop").hidden = !now;
  at("log").setAttribute("aria-busy", String(now));
  if (now) at("said").textContent = "The answer begins.";
}

function stop() {
  running?.abort();
}

function regenerate() {
  if (running) return;
  if (messages.at(-1)?.role === "assistant") messages.pop();
  const last = at("log").lastElementChild;
  if (last?.classList.contains("assistant")) last.remove();
  if (messages.length) answer();
}

function send(event) {
  event?.preventDefault();
  const text = at("prompt").value;
  if (!text.trim() || running) return;
  at("hello").hidden = true;
  messages.push({ role: "user", content: text });
  at("log").append(element("li", { className: "user" }, element("div", {}, text)));
  at("prompt").value = "";
  grow();
  answer();
}

function fresh() {
  const old = running;
  running = null;
  old?.abort();
  busy(false);
  messages.length = 0;
  at("log").replaceChildren();
  at("said").textContent = "";
  at("hello").hidden = false;
  at("prompt").focus();
}

// --- field, theme, views, key

function grow() {
  const field = at("prompt");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

function view(name) {
  document.body.dataset.view = name;
  for (const other of ["chat", "monitor"]) {
    const tab = at(`tab-${other}`);
    tab.setAttribute("aria-selected", String(other === name));
    tab.tabIndex = other === name ? 0 : -1;
  }
}

function theme(flip) {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  let wanted = localStorage.getItem("strata-theme");
  if (flip) {
    wanted = (root.dataset.theme ?? (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
    localStorage.setItem("strata-theme", wanted);
  }
  if (wanted) root.dataset.theme = wanted;
}

at("composer").addEventListener("submit", send);
at("stop").addEventListener("click", stop);
at("new").addEventListener("click", fresh);
at("theme").addEventListener("click", () => theme(true));
at("prompt").addEventListener("input", grow);
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) stop();
});
for (const name of ["chat", "monitor"]) {
  at(`tab-${name}`).addEventListener("click", () => view(name));
  at(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = name === "chat" ? "monitor" : "chat";
    view(other);
    at(`tab-${other}`).focus();
  });
}
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value;
  sessionStorage.setItem("strata-key", key);
  at("key").value = "";
  look();
});
theme(false);
view("chat");
look();
setInterval(look, 1000);
document.addEventListener("visibilitychange", look);
at("prompt").focus();
