// Tokens of a segment: their texts, coloured by one of their figures, which a box shows for the token under the pointer.

const TOKEN_MODES = [
  ["logprob", "log-probability"],
  ["version", "weight version"],
  ["mask", "trained or not"],
  ["gap", "gap to the trainer"],
];
const BLOCK = 2000;

function tokenLegend(mode) {
  const item = (name, text) => el("span", null, el(`span.token.${name}`, null, "token"), ` ${text}`);
  const kinds = {
    logprob: [
      item("h0", "p ≥ 0.9"),
      item("h2", "0.5"),
      item("h4", "0.1"),
      item("h6", "0.01"),
      item("h8", "below 0.001"),
    ],
    version: [item("v0", "a colour for each version, in turn")],
    mask: [item("trained", "sampled and trained"), item("left", "sampled, left out of training")],
    gap: [item("gap", "among the tokens of its step on which trainer and server differed most")],
  };
  return el("div.legend", null, kinds[mode], item("context", "context"));
}

/** 0 for certain tokens, up to 8 for those that were next to impossible. */
function heat(logprob) {
  const limits = [0.9, 0.7, 0.5, 0.3, 0.1, 0.03, 0.01, 0.001];
  const chance = Math.exp(logprob);
  const place = limits.findIndex((limit) => chance >= limit);
  return place < 0 ? limits.length : place;
}

function versionAt(segment, place) {
  const span = (segment.weight_versions || []).find(([, start, end]) => place >= start && place < end);
  return span ? span[0] : null;
}

const leftOutAt = (segment, place) => (segment.left_out || []).some(([start, end]) => place >= start && place < end);

function tokenKind(segment, place, mode, gaps) {
  if (segment.kind !== "sampled") return "context";
  if (mode === "logprob") return segment.logprobs ? `h${heat(segment.logprobs[place])}` : "plain";
  if (mode === "version") {
    const version = versionAt(segment, place);
    return version === null ? "plain" : `v${version % 8}`;
  }
  if (mode === "mask") return leftOutAt(segment, place) ? "left" : "trained";
  return gaps.has(place) ? "gap" : "plain";
}

function segmentTokens(segment, mode, words, record, show) {
  if (!segment.token_ids)
    return note(
      record.recorded === "text"
        ? "Recorded as text: there are no token ids."
        : "This trajectory is too large to be here with its tokens.",
    );
  const gaps = new Map(
    record.gaps
      .filter(([index]) => index === segment.index)
      .map(([, place, rollout, trainer, step]) => [place, { rollout, trainer, step }]),
  );
  const box = el("div.tokens", {
    onmouseover: (event) =>
      event.target.place !== undefined && show(tokenFacts(segment, event.target.place, words, gaps)),
  });
  let next = 0;
  const more = el("div.sentinel");
  const seen = new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && add(), {
    rootMargin: "800px",
  });
  const add = () => {
    const block = el("div");
    for (const end = Math.min(next + BLOCK, segment.token_ids.length); next < end; next++) {
      const span = document.createElement("span");
      span.className = `token ${tokenKind(segment, next, mode, gaps)}`;
      span.textContent = tokenText(words[segment.token_ids[next]], segment.token_ids[next]);
      span.place = next;
      block.append(span);
    }
    more.before(block);
    if (next < segment.token_ids.length) return;
    seen.disconnect();
    more.remove();
  };
  box.append(more);
  add();
  if (more.isConnected || next < segment.token_ids.length) seen.observe(more);
  return box;
}

function tokenText(word, id) {
  if (word === undefined || word === "") return `⟨${id}⟩`;
  return word.replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t");
}

function tokenFacts(segment, place, words, gaps) {
  const id = segment.token_ids[place];
  const facts = [
    ["token", JSON.stringify(words[id] === undefined ? null : words[id])],
    ["id", id],
    ["place", `${place} of segment ${segment.index}`],
  ];
  if (segment.logprobs)
    facts.push(
      ["log-probability", segment.logprobs[place].toFixed(4)],
      ["probability", figure(Math.exp(segment.logprobs[place]))],
    );
  const version = versionAt(segment, place);
  if (version !== null) facts.push(["weight version", version]);
  facts.push([
    "loss mask",
    segment.kind !== "sampled" ? "0, context" : leftOutAt(segment, place) ? "0, left out" : "1, sampled",
  ]);
  const gap = gaps.get(place);
  if (gap) facts.push(["server, trainer", `${gap.rollout.toFixed(4)}, ${gap.trainer.toFixed(4)} at step ${gap.step}`]);
  return facts;
}
