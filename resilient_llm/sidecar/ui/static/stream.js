// What the server tells, for as long as somebody looks: opened again when it breaks off, and given up on when the
// session is over. The whole state comes with every message, so that nothing has to be caught up with.

const BASE = "/admin/ui";
const LONGEST_WAIT = 8000;
const SILENCE = 10000;

export class Stream {
  #source = null;
  #timer = null;
  #failures = 0;
  #heard = 0;
  #wanted = false;
  #query;
  #onState;
  #onLink;

  // `query` gives the parameters to ask with, `onState` gets each state, `onLink` how the connection is: connecting,
  // live, lost, full, over.
  constructor({ query, onState, onLink }) {
    this.#query = query;
    this.#onState = onState;
    this.#onLink = onLink;
    setInterval(() => this.#watch(), 1000);
    document.addEventListener("visibilitychange", () => this.#wanted && this.open());
    addEventListener("online", () => this.#wanted && this.#source === null && this.open());
  }

  open() {
    this.#wanted = true;
    this.#stop();
    if (document.visibilityState === "hidden") return; // nobody looks
    void this.#ask();
  }

  close() {
    this.#wanted = false;
    this.#stop();
  }

  #stop() {
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#source?.close();
    this.#source = null;
  }

  // An EventSource does not say why it was refused, so that is asked first.
  async #ask() {
    const asked = (this.#timer = setTimeout(() => this.#again("lost"), SILENCE));
    let answer;
    try {
      answer = await fetch(`${BASE}/session`, { cache: "no-store", redirect: "error" });
    } catch {
      if (this.#timer === asked) this.#again("lost");
      return;
    }
    if (this.#timer !== asked) return; // something else was wanted meanwhile
    clearTimeout(asked);
    if (answer.status === 401 || answer.status === 403) {
      this.#stop();
      this.#onLink("over");
    } else if (answer.status === 503) this.#again("full");
    else if (answer.ok) this.#listen(await answer.json());
    else this.#again("lost");
  }

  #listen(session) {
    if (!this.#wanted) return;
    this.#stop();
    const source = (this.#source = new EventSource(`${BASE}/events?${this.#query()}`));
    this.#heard = Date.now();
    source.addEventListener("state", (event) => {
      if (source !== this.#source) return;
      this.#heard = Date.now();
      this.#failures = 0;
      this.#onLink("live", session);
      this.#onState(JSON.parse(event.data));
    });
    source.addEventListener("expired", () => {
      this.#stop();
      this.#onLink("over");
    });
    source.onerror = () => source === this.#source && this.#again("lost");
  }

  #again(why) {
    this.#stop();
    this.#onLink(why);
    const wait = Math.min(LONGEST_WAIT, 500 * 2 ** this.#failures);
    this.#failures += 1;
    this.#timer = setTimeout(() => this.open(), wait * (0.75 + Math.random() / 2));
  }

  // A connection may be dead without anybody being told: a machine that slept, a proxy that forgot.
  #watch() {
    if (this.#source !== null && Date.now() - this.#heard > SILENCE) this.#again("lost");
  }
}
