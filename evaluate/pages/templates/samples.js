'use strict';
(() => {
const SIZE = 25, data = JSON.parse(document.getElementById('data').textContent), items = data.items;
const get = id => document.getElementById(id), list = get('list'), both = data.names[1] !== null;
let found = items, first = 0, at = -1;  // what the filters left; the first of it on the page; where j and k are

// As in page.py: what would hide or reorder text is spelled out.
const lone = '[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]';
const odd = '[\\0-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ufeff\\ufffe\\uffff]';
const hidden = new RegExp(odd + '|' + lone, 'g');
const spell = c => '‹U+' + c.charCodeAt(0).toString(16).toUpperCase().padStart(4, '0') + '›';
const show = text => String(text).replace(/\r\n/g, '\n').replace(hidden, spell);

function make(tag, kind, text) {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  if (text !== undefined) node.textContent = show(text);
  return node;
}
function scrolling(text, kind, name) {
  const node = make('pre', 'text ' + kind, text);
  node.dir = 'auto'; node.tabIndex = 0;
  node.setAttribute('role', 'group'); node.setAttribute('aria-label', name);
  return node;
}
const isNumber = value => typeof value === 'number';
const whole = value => value.toLocaleString('en');
const number = (value, digits) => isNumber(value) ? value.toFixed(digits).replace('-', '−') : String(value ?? '–');

// Filters.

const tests = {
  right: item => item.ok === 1, wrong: item => item.ok === 0,
  truncated: item => item.truncated, contaminated: item => item.contaminated, clean: item => !item.contaminated,
  differ: item => item.other && item.other.ok !== item.ok,
  gained: item => item.other && item.ok === 1 && item.other.ok === 0,
  lost: item => item.other && item.ok === 0 && item.other.ok === 1,
};
const orders = {
  p_right: item => item.p_right,
  margin: item => isNumber(item.margin) ? Math.abs(item.margin) : undefined,
  gold_bpb: item => isNumber(item.gold_bpb) ? -item.gold_bpb : isNumber(item.bpb) ? -item.bpb : undefined,
};
const value = id => get(id) ? get(id).value : '';

function filter() {
  const task = value('task'), kept = ['ok', 'differ', 'flag'].map(value).filter(Boolean).map(name => tests[name]);
  const wanted = value('search').trim().toLowerCase(), order = orders[value('order')];
  const has = text => text !== undefined && String(text).toLowerCase().includes(wanted);
  const matches = item => has(item.prompt) || has(item.answer) || has(item.target) || (item.choices || []).some(has) ||
    has(item.other && item.other.answer);
  found = items.filter(item => (task === '' || item.task === Number(task)) && kept.every(test => test(item)) &&
    (!wanted || matches(item)));
  if (order) {
    const keys = new Map(found.map(item => [item, isNumber(order(item)) ? order(item) : Infinity]));
    found.sort((a, b) => keys.get(a) - keys.get(b) || 0);
  }
  draw(0);
}

function draw(start) {
  first = start; at = -1;
  list.replaceChildren(...found.slice(first, first + SIZE).map(card));
  for (const box of list.querySelectorAll('.prompt')) box.scrollTop = box.scrollHeight;  // the question is at the end
  const end = Math.min(first + SIZE, found.length), all = whole(items.length);
  const part = found.length < items.length ? ` (${all} in all)` : '';
  get('said').textContent = found.length
    ? `Items ${whole(first + 1)} to ${whole(end)} of ${whole(found.length)}${part}`
    : `None of the ${all} items matches these filters.`;
  for (const id of ['back', 'back2']) get(id).disabled = first === 0;
  for (const id of ['on', 'on2']) get(id).disabled = end >= found.length;
}

// One item.

function card(item) {
  const node = make('li', 'card'), head = make('header');
  const tag = (kind, text) => head.append(make('span', 'tag ' + kind, text));
  const mark = (ok, who) => { if (ok !== undefined) tag(ok ? 'good' : 'bad', who + (ok ? '✓ right' : '✗ wrong')); };
  node.tabIndex = -1;
  head.append(make('b', '', data.tasks[item.task]), make('span', 'soft', '#' + item.index));
  mark(item.ok, item.other ? 'this: ' : '');
  if (item.other) mark(item.other.ok, 'other: ');
  if (item.truncated) tag('warn', 'prompt was cut');
  if (item.contaminated) tag('warn', 'contaminated');
  const known = [['p(right)', item.p_right], ['margin', item.margin], ['gold BPB', item.gold_bpb], ['BPB', item.bpb]]
    .filter(entry => entry[1] !== undefined).map(([name, value]) => name + ' ' + number(value, 3));
  head.append(make('span', 'numbers', known.join(' · ')));
  node.append(head);
  if (item.prompt) node.append(scrolling(item.prompt, 'prompt', 'prompt'));
  if (item.choices) node.append(answers(item));
  if (item.answer !== undefined || item.target !== undefined) node.append(written(item));
  return node;
}

// A choice's share of the probability of all of them; of a single answer, its probability.
function shares(values) {
  if (!values || !values.length || !values.every(isNumber)) return null;
  if (values.length === 1) return [Math.exp(values[0])];
  const top = Math.max(...values), raw = values.map(value => Math.exp(value - top));
  const sum = raw.reduce((a, b) => a + b, 0);
  return raw.map(value => value / sum);
}
const chosen = values => shares(values) && values.length > 1 ? values.indexOf(Math.max(...values)) : -1;

function answers(item) {
  const table = make('table', 'answers'), columns = make('colgroup'), head = make('tr'), body = make('tbody');
  const several = item.choices.length > 1, theirs = item.other && item.other.log_probabilities;
  const sides = [item, ...(theirs ? [item.other] : [])].map((side, place) => ({
    name: theirs ? ['this, ', 'other, '][place] : '', kind: place ? ' theirs' : '', nats: side.log_probabilities || [],
    shares: shares(side.log_probabilities), chosen: chosen(side.log_probabilities),
  }));
  const heading = (kind, text, column) => {
    const cell = make('th', kind, text);
    cell.scope = 'col'; head.append(cell); columns.append(make('col', column));
  };
  heading('', '', 'gold'); heading('', several ? 'choice' : 'answer', '');
  for (const side of sides) {
    heading('r', side.name + 'nats', 'nats');
    heading('', side.name + (several ? 'share' : 'probability'), 'part');
  }
  item.choices.forEach((choice, place) => {
    const gold = (item.right || []).includes(place);
    const line = make('tr', gold ? 'gold' : ''), say = make('td', 'say', choice);
    say.dir = 'auto';
    line.append(make('td', 'mark', gold ? 'right' : ''), say);
    for (const side of sides) line.append(make('td', 'r', number(side.nats[place], 2)), share(side, place));
    body.append(line);
  });
  const top = make('thead');
  top.append(head); table.append(columns, top, body);
  return table;
}

function share(side, place) {
  const cell = make('td');
  if (!side.shares || side.shares[place] === undefined) return cell;
  const part = side.shares[place], isChosen = side.chosen === place;
  const row = make('div', 'share' + side.kind + (isChosen ? ' chosen' : '')), track = make('i'), fill = make('u');
  fill.style.width = (100 * part).toFixed(1) + '%';
  track.append(fill);
  const said = part < 0.0005 ? '<0.001' : part.toFixed(3);
  row.append(track, make('span', '', said), make('em', '', isChosen ? 'chosen' : ''));
  cell.append(row);
  return cell;
}

function written(item) {
  const box = make('div', 'said');
  const add = (name, text) => {
    if (text === undefined) return;
    const side = make('div');
    side.append(make('h4', '', name), scrolling(text, '', name)); box.append(side);
  };
  add('expected', item.target);
  add(both ? 'this checkpoint wrote' : 'the model wrote', item.answer);
  add('the other wrote', item.other && item.other.answer);
  return box;
}

// Moving about.

function go(step) {
  const next = at + step;
  if (next < 0) {
    if (first === 0) return;
    draw(first - SIZE); at = list.children.length - 1;
  } else if (next >= list.children.length) {
    if (first + SIZE >= found.length) return;
    draw(first + SIZE); at = 0;
  } else at = next;
  list.children[at].focus({preventScroll: true});
  list.children[at].scrollIntoView({block: 'start'});
}
function turn(step) { draw(first + step * SIZE); get('samples').scrollIntoView(); }

// A task's name in the table of scores leads to its samples.
function follow() {
  const asked = /^#task=(\d+)$/.exec(location.hash);
  if (!asked || Number(asked[1]) >= data.tasks.length) return;
  get('task').value = Number(asked[1]); filter(); get('samples').scrollIntoView();
}

data.tasks.forEach((name, place) => {
  const option = make('option', '', name);
  option.value = place; get('task').append(option);
});
for (const id of ['task', 'ok', 'differ', 'flag', 'order']) if (get(id)) get(id).addEventListener('change', filter);
let waiting;
get('search').addEventListener('input', () => { clearTimeout(waiting); waiting = setTimeout(filter, 150); });
for (const id of ['on', 'on2']) get(id).addEventListener('click', () => turn(1));
for (const id of ['back', 'back2']) get(id).addEventListener('click', () => turn(-1));
list.addEventListener('focusin', event => { at = [...list.children].indexOf(event.target.closest('.card')); });
document.addEventListener('keydown', event => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (event.key === 'j') go(1);
  else if (event.key === 'k') go(-1);
  else if (event.key === '/') { event.preventDefault(); get('search').focus(); }
});
addEventListener('hashchange', follow);
filter(); follow();
})();
