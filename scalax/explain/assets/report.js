// How a report looks and answers: the rows of tree.js, drawn as far as one scrolls. widget.js calls `start`.
// Whatever a report says is set as text, never as HTML.

const STEP = 300; // rows drawn at a time
const ROUNDED = new Intl.NumberFormat('en', {
  minimumFractionDigits: 1, maximumFractionDigits: 1, useGrouping: false, roundingMode: 'halfEven',
});

function bytesText(count) {
  let unit = 'B';
  for (const next of ['KiB', 'MiB', 'GiB', 'TiB']) {
    if (count < 1024) break;
    count /= 1024;
    unit = next;
  }
  return `${unit === 'B' ? count : ROUNDED.format(count)} ${unit}`;
}

const numberText = (number) => number.toLocaleString('en');
const arraysText = (count) => `${numberText(count)} array${count === 1 ? '' : 's'}`;

function make(tag, className = '', ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

// Lines break behind slashes and commas first.
const breakable = (text) => text.split(/(?<=[/,])/).flatMap((part) => [part, make('wbr')]);

function start(root, data) {
  const find = (selector) => root.querySelector(selector);
  const lines = data.lines.map((values, index) => new Line(values, data.texts, index));
  const top = grow(lines);
  top.measure();
  const total = { arrays: top.arrays, bytes: top.bytes, perDevice: top.perDevice };
  const largest = lines.reduce((most, line) => Math.max(most, line.perDevice), 1);
  const axes = new Map(data.mesh.map(([name], index) => [name, index % 6]));
  const state = { text: '', isRegex: false, wholeOnly: false, isFiltered: false, order: 'tree', isList: false };
  const hasGroups = top.kids.some((kid) => kid instanceof Group);
  const body = find('tbody');
  const shown = new WeakMap(); // row -> what it shows
  let rest = walk([], state);

  function axisText(name, text = name) {
    return axes.has(name) ? make('span', `axis axis-${axes.get(name)}`, text) : text;
  }

  function specCell(line) {
    if (line.replicated) return make('td', 'spec', make('b', '', line.spec));
    const parts = line.spec.split(/('[^']*')/).map((part) => axisText(part.slice(1, -1), part));
    return make('td', 'spec', ...parts);
  }

  function whyCell(line) {
    const cell = make('div', '', make('code', '', line.rule));
    if (line.reason) cell.append(make('span', '', `${line.rule ? ': ' : ''}${line.reason}`));
    cell.title = cell.textContent; // one line of it is seen, all of it where the focus is
    return make('td', 'why', cell);
  }

  function barOf(perDevice) {
    const fill = make('i');
    fill.style.width = `${perDevice ? Math.max(1, (100 * perDevice) / largest) : 0}%`;
    return make('div', 'bar', fill);
  }

  function draw(item) {
    const { node, level, leaf } = item;
    const isGroup = node instanceof Group;
    const isLeaf = leaf !== undefined;
    const sizes = isLeaf ? node.each : node;
    const name = isLeaf ? node.pathOf(leaf, !state.isList) : state.isList ? node.name : node.label;
    const row = make('tr');
    row.setAttribute('role', 'row');
    row.setAttribute('aria-level', level);
    row.tabIndex = -1;
    row.style.setProperty('--level', level - 1);
    row.classList.add(isGroup ? 'group' : isLeaf ? 'leaf' : 'line');
    row.classList.toggle('replicated', !isGroup && node.replicated);
    row.classList.toggle('compiler', !isGroup && node.spec.startsWith('compiler'));
    const path = make('td', 'path', make('span', 'name', ...breakable(name)));
    if (!isLeaf && node.isOpenable) {
      row.classList.add('openable');
      row.setAttribute('aria-expanded', isShownOpen(node, state));
    }
    if (!isGroup && !isLeaf && node.count > 1) {
      const some = node.hits
        ? `${numberText(node.arrays)} of ${numberText(node.count)}` : `× ${numberText(node.count)}`;
      path.append(' ', make('span', 'times', some));
    }
    const percent = make('span', 'share', `${ROUNDED.format((100 * node.perDevice) / (total.perDevice || 1))} %`);
    row.append(
      path,
      make('td', 'array', ...breakable(isGroup ? arraysText(node.arrays) : node.array)),
      isGroup ? make('td', 'spec') : specCell(node),
      make('td', 'bytes', bytesText(sizes.bytes)),
      make('td', 'device', make('span', 'number', bytesText(sizes.perDevice)),
        isGroup ? percent : barOf(sizes.perDevice)),
      isGroup ? make('td', 'why') : whyCell(node),
    );
    for (const cell of row.cells) cell.setAttribute('role', 'gridcell');
    shown.set(row, item);
    return row;
  }

  function drawMore(most = STEP) {
    const rows = document.createDocumentFragment();
    let next;
    for (let i = 0; i < most && !(next = rest.next()).done; i++) rows.append(draw(next.value));
    body.append(rows);
    const more = find('.more');
    more.hidden = !next || next.done;
    more.textContent = `Show ${STEP} more rows`;
  }

  // Draws anew what is seen, no fewer rows than before; the row of `focus` gets the focus.
  function redraw({ most = STEP, focus = null } = {}) {
    rest = walk(state.isList ? lines : top.kids, state);
    body.replaceChildren();
    drawMore(most);
    const rows = [...body.rows];
    const row = rows.find((each) => {
      const { node, leaf } = shown.get(each);
      return node === focus?.node && leaf === focus.leaf;
    });
    if (rows.length) (row ?? rows[0]).tabIndex = 0;
    row?.focus({ preventScroll: true });
    find('.all').hidden = state.isList || !hasGroups;
    for (const head of root.querySelectorAll('th button')) {
      const isSorted = head.dataset.sort.split(' ').at(-1) === state.order;
      const direction = state.order === 'name' ? 'ascending' : 'descending';
      head.parentNode.setAttribute('aria-sort', isSorted ? direction : 'none');
    }
  }

  function update() {
    const box = find('.filter');
    const count = find('.count');
    box.setAttribute('aria-invalid', 'false');
    count.classList.remove('bad');
    try {
      filter(lines, data.texts, state);
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error;
      box.setAttribute('aria-invalid', 'true');
      count.classList.add('bad');
      count.textContent = error.message;
      return;
    }
    state.isFiltered = Boolean(state.text || state.wholeOnly);
    for (const group of top.groups()) group.isClosedByHand = false;
    top.measure();
    count.textContent = state.isFiltered
      ? `${numberText(top.arrays)} of ${arraysText(total.arrays)}: ${bytesText(top.perDevice)} of `
        + `${bytesText(total.perDevice)} per device, ${bytesText(top.bytes)} of ${bytesText(total.bytes)} in all`
      : `${arraysText(total.arrays)} in ${numberText(lines.length)} line${lines.length === 1 ? '' : 's'}`
        + (total.perDevice ? `; the longest bar is ${bytesText(largest)}` : '');
    redraw();
  }

  function toggle(item, isOpen = !isShownOpen(item.node, state)) {
    if (!item.node.isOpenable || item.leaf !== undefined) return;
    item.node.isOpen = isOpen;
    item.node.isClosedByHand = !isOpen;
    redraw({ most: Math.max(STEP, body.rows.length), focus: item });
  }

  // The keys of a tree: up, down, home, end; right opens or goes in, left closes or goes out.
  function onKey(event) {
    const row = event.target.closest('tr');
    if (!row || event.ctrlKey || event.altKey || event.metaKey) return;
    const item = shown.get(row);
    const isOpenable = row.hasAttribute('aria-expanded');
    const isOpen = row.getAttribute('aria-expanded') === 'true';
    let goal = null;
    if (event.key === 'ArrowDown') goal = row.nextElementSibling;
    else if (event.key === 'ArrowUp') goal = row.previousElementSibling;
    else if (event.key === 'Home') goal = body.rows[0];
    else if (event.key === 'End') goal = body.rows[body.rows.length - 1];
    else if (event.key === 'ArrowRight' && isOpen) goal = row.nextElementSibling;
    else if (event.key === 'ArrowRight') toggle(item, true);
    else if (event.key === 'ArrowLeft' && isOpen) toggle(item, false);
    else if (event.key === 'ArrowLeft') {
      for (goal = row; goal && shown.get(goal).level >= item.level;) goal = goal.previousElementSibling;
    } else if ((event.key === 'Enter' || event.key === ' ') && isOpenable) toggle(item);
    else return;
    event.preventDefault();
    if (goal) moveTo(goal);
  }

  function moveTo(row) {
    for (const each of body.querySelectorAll('[tabindex="0"]')) each.tabIndex = -1;
    row.tabIndex = 0;
    row.focus();
  }

  function fillHead() {
    find('.title').textContent = data.title;
    find('.mesh').append(...data.mesh.map(([name, size]) => make('li', '', axisText(name), ` ${numberText(size)}`)));
    const devices = data.mesh.reduce((product, [, size]) => product * size, 1);
    find('.mesh').append(make('li', 'product', `${numberText(devices)} device${devices === 1 ? '' : 's'}`));
    const whole = lines.filter((line) => line.replicated);
    const sum = (key) => whole.reduce((amount, line) => amount + line[key], 0);
    const stats = [
      ['arrays', numberText(total.arrays)], ['in all', bytesText(total.bytes)],
      ['on each device', bytesText(total.perDevice)],
      [`replicated on each device, ${arraysText(sum('arrays'))}`, bytesText(sum('perDevice'))],
    ];
    const [parts, partBytes] = data.unreduced;
    if (parts) stats.splice(3, 0, [`unreduced on each device, ${arraysText(parts)}`, bytesText(partBytes)]);
    find('.totals').append(...stats.map(([name, text]) => make('div', '', make('dt', '', name), make('dd', '', text))));
    find('.totals').lastChild.classList.toggle('warn', whole.length > 0);
    find('.whole').hidden = !whole.length;
    const idle = [
      [data.unused, 'matches nothing', 'match nothing'],
      [data.shadowed, 'is always shadowed by earlier ones', 'are always shadowed by earlier ones'],
    ];
    for (const [regexes, says, say] of idle) {
      if (!regexes.length) continue;
      const items = regexes.map((regex) => make('li', '', make('code', '', regex)));
      const summary = regexes.length === 1 ? `1 regex ${says}` : `${regexes.length} regexes ${say}`;
      find('.idle').append(make('details', '', make('summary', '', summary), make('ul', '', ...items)));
    }
  }

  function press(selector, action) {
    const button = find(selector);
    button.addEventListener('click', () => {
      const isPressed = button.getAttribute('aria-pressed') !== 'true';
      if (button.hasAttribute('aria-pressed')) button.setAttribute('aria-pressed', isPressed);
      action(isPressed);
    });
  }

  function sortBy(order) {
    state.order = order;
    find('select').value = order;
    redraw();
  }

  function openAll(isOpen) {
    for (const group of top.groups()) Object.assign(group, { isOpen, isClosedByHand: !isOpen });
    redraw();
  }

  find('.filter').addEventListener('input', (event) => { state.text = event.target.value; update(); });
  press('.regex', (isPressed) => { state.isRegex = isPressed; update(); });
  press('.whole', (isPressed) => { state.wholeOnly = isPressed; update(); });
  press('.list', (isPressed) => { state.isList = isPressed; redraw(); });
  press('.open', () => openAll(true));
  press('.close', () => openAll(false));
  press('.more', () => drawMore());
  find('select').addEventListener('change', (event) => sortBy(event.target.value));
  find('thead').addEventListener('click', (event) => {
    const orders = event.target.dataset.sort?.split(' ');
    if (orders) sortBy(orders[(orders.indexOf(state.order) + 1) % orders.length]);
  });
  body.addEventListener('click', (event) => {
    const cell = event.target.closest('td.path');
    if (cell) toggle(shown.get(cell.parentNode));
  });
  body.addEventListener('keydown', onKey);
  // Rows come as one scrolls.
  const drawIfSeen = (entries) => { if (entries.some((each) => each.isIntersecting)) drawMore(); };
  new IntersectionObserver(drawIfSeen, { rootMargin: '400px' }).observe(find('.more'));
  fillHead();
  update();
}
