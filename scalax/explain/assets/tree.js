// What a report shows: lines, each of one array or of the same one in many layers, and groups of them;
// which of it the filter lets through, and in which order. Nothing here knows of the page.

const OPEN_AT_FIRST = 60; // groups are open from the start while there are fewer rows than this
const COLLATOR = new Intl.Collator('en', { numeric: true });

class Line {
  constructor(values, texts, index) {
    const [path, array, spec, rule, reason, bytes, perDevice, replicated] = values;
    Object.assign(this, { index, replicated, spec: texts[spec], rule: texts[rule], reason: texts[reason] });
    this.array = texts[array];
    this.keys = path.map((key) => (typeof key === 'string' ? key : key[0]));
    this.name = this.keys.join('/') || '(leaf)';
    this.label = this.keys.at(-1) || '(leaf)';
    this.path = path;
    this.each = { bytes, perDevice };
    this.count = path.reduce((count, key) => count * (typeof key === 'string' ? 1 : sizeOf(key[1])), 1);
    this.isOpen = false;
    this.hits = null; // the numbers of the arrays that the filter lets through; null for all
  }

  get isOpenable() { return this.count > 1; }
  get arrays() { return this.hits ? this.hits.length : this.count; }
  get bytes() { return this.arrays * this.each.bytes; }
  get perDevice() { return this.arrays * this.each.perDevice; }

  // The path of one of the arrays, or its end from the first number, or from the key before one that is a
  // key by itself; the last number of the path varies fastest.
  pathOf(number, isShort = false) {
    const keys = [...this.path];
    for (let place = keys.length - 1; place >= 0; place--) {
      if (typeof keys[place] === 'string') continue;
      const [, runs, stem] = keys[place];
      const size = sizeOf(runs);
      keys[place] = `${stem}${nth(runs, number % size)}`;
      number = Math.floor(number / size);
    }
    const first = this.path.findIndex((key) => typeof key !== 'string');
    const start = isShort ? Math.max(0, this.path[first]?.[2] ? first : first - 1) : 0;
    return keys.slice(start).join('/') || '(leaf)';
  }
}

const sizeOf = (runs) => runs.reduce((size, [first, last]) => size + last - first + 1, 0);

function nth(runs, number) {
  for (const [first, last] of runs) {
    if (number <= last - first) return first + number;
    number -= last - first + 1;
  }
  throw new RangeError('no such number');
}

class Group {
  constructor(label, index) {
    Object.assign(this, { label, index, kids: [], isOpen: false, isClosedByHand: false, byKey: new Map() });
  }

  get isOpenable() { return true; }

  child(path, index) {
    const id = String(path);
    if (!this.byKey.has(id)) {
      const group = new Group(typeof path === 'string' ? path : path[0], index);
      this.byKey.set(id, group);
      this.kids.push(group);
    }
    return this.byKey.get(id);
  }

  // A group of one thing is that thing, with a longer name.
  settle() {
    this.kids = this.kids.map((kid) => (kid instanceof Group ? kid.settle() : kid));
    if (this.kids.length !== 1 || this.label === null) return this;
    this.kids[0].label = `${this.label}/${this.kids[0].label}`;
    return this.kids[0];
  }

  measure() {
    Object.assign(this, { arrays: 0, bytes: 0, perDevice: 0 });
    for (const kid of this.kids) {
      if (kid instanceof Group) kid.measure();
      this.arrays += kid.arrays;
      this.bytes += kid.bytes;
      this.perDevice += kid.perDevice;
    }
  }

  *groups() {
    for (const kid of this.kids) {
      if (!(kid instanceof Group)) continue;
      yield kid;
      yield* kid.groups();
    }
  }
}

function grow(lines) {
  const top = new Group(null, 0);
  for (const line of lines) {
    let group = top;
    for (const key of line.path.slice(0, -1)) group = group.child(key, line.index);
    group.kids.push(line);
  }
  top.settle();
  // The top levels are open, as many as a screen takes.
  let rows = top.kids.length;
  let level = top.kids;
  while (level.length) {
    const groups = level.filter((node) => node instanceof Group);
    level = groups.flatMap((group) => group.kids);
    rows += level.length;
    if (rows > OPEN_AT_FIRST) break;
    for (const group of groups) group.isOpen = true;
  }
  return top;
}

// --- Which of it is seen, and in which order ---

const ORDERS = {
  tree: (a, b) => a.index - b.index,
  name: (a, b) => COLLATOR.compare(a.label, b.label) || a.index - b.index,
  path: (a, b) => COLLATOR.compare(a.name, b.name) || a.index - b.index,
  bytes: (a, b) => b.bytes - a.bytes || a.index - b.index,
  device: (a, b) => b.perDevice - a.perDevice || a.index - b.index,
};

function tester(text, isRegex) {
  if (isRegex) {
    const regex = new RegExp(text, 'i');
    return (value) => regex.test(value);
  }
  const wanted = text.toLowerCase();
  return (value) => value.toLowerCase().includes(wanted);
}

function filter(lines, texts, { text, isRegex, wholeOnly }) {
  const test = tester(text, isRegex);
  const known = new Map(texts.map((value) => [value, test(value)])); // each distinct text is tested once
  for (const line of lines) {
    line.hits = wholeOnly && !line.replicated ? [] : null;
    if (line.hits || !text) continue;
    if ([line.array, line.spec, line.rule, line.reason].some((value) => known.get(value))) continue;
    if (line.count === 1) {
      line.hits = test(line.name) ? null : [];
      continue;
    }
    // A brace is only in the names of folded lines; all else is asked of each path by itself.
    if (text.includes('{') && test(line.name)) continue;
    const hits = [];
    for (let number = 0; number < line.count; number++) if (test(line.pathOf(number))) hits.push(number);
    if (hits.length < line.count) line.hits = hits;
  }
}

function* walk(nodes, state, level = 1) {
  const order = state.isList && state.order === 'name' ? 'path' : state.order;
  for (const node of nodes.filter((each) => each.arrays).sort(ORDERS[order])) {
    yield { node, level };
    const isOpen = isShownOpen(node, state);
    if (isOpen && node instanceof Group) yield* walk(node.kids, state, level + 1);
    else if (isOpen) {
      for (let i = 0; i < node.arrays; i++) yield { node, level: level + 1, leaf: node.hits?.[i] ?? i };
    }
  }
}

// What a filter lets through is seen at once, unless it is closed by hand.
function isShownOpen(node, { isFiltered }) {
  return isFiltered && node instanceof Group ? !node.isClosedByHand : node.isOpen;
}
