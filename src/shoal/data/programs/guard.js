// Loaded before a program: the functions that tests compare with stay as they are.
//
// Each becomes a property whose value an assignment does not change. An assignment to an object
// that only inherits it makes a property of that object, as always.
'use strict'
const { defineProperty, getOwnPropertyDescriptors, freeze } = Object

function hold(owner) {
  for (const [name, { value, enumerable, configurable }] of Object.entries(getOwnPropertyDescriptors(owner))) {
    if (typeof value !== 'function' || !configurable || ['constructor', 'then'].includes(name)) continue
    defineProperty(owner, name, {
      get: () => value,
      set(other) {
        if (this !== owner) defineProperty(this, name, { value: other, writable: true, enumerable: true, configurable: true })
      },
      enumerable,
      configurable: false,
    })
  }
}

const names = [
  'Object', 'Array', 'String', 'Number', 'Boolean', 'BigInt', 'Math', 'JSON', 'Map', 'Set', 'Date', 'RegExp', 'Reflect',
  'Error', 'isNaN', 'isFinite',
]
const held = { require, process, console }
for (const name of names) held[name] = globalThis[name]
const assert = require('assert')
const Module = require('module')
const libraries = [assert, assert.strict, Module, Module.prototype]
try {
  libraries.push(require('lodash'))
} catch {
  // Few machines have it, and few tests need it.
}
const prototypes = ['Object', 'Array', 'String', 'Number', 'Boolean', 'BigInt', 'Map', 'Set', 'Date', 'RegExp', 'Function']
libraries.push(...names.map((name) => globalThis[name]), ...prototypes.map((name) => globalThis[name].prototype))
libraries.push(process, console)
libraries.forEach(hold)
for (const name of names) defineProperty(globalThis, name, { get: () => held[name], set() {}, configurable: false })
defineProperty(globalThis, 'heldForTests', { value: freeze(held) })
