#!/bin/sh
# Writes the certificates of the TLS tests into this folder, with OpenSSL 3. They are for loopback only, and protect
# nothing. All but expired.pem are valid for 100 years.
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)

new_key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:prime256v1 -out "$1"; }

for name in authority other-authority; do
    new_key "$work/$name.key"
    openssl req -x509 -new -key "$work/$name.key" -out $name.crt -days 36500 -subj "/CN=rmq-spark test $name" \
        -addext keyUsage=critical,keyCertSign,cRLSign
done

# sign NAME SUBJECT_ALT_NAME START END: NAME.pem has the certificate and its key.
sign() {
    new_key "$work/$1.key"
    openssl req -new -key "$work/$1.key" -out "$work/$1.csr" -subj "/CN=$1"
    : > "$work/index"
    cat > "$work/ca.cnf" << END
[ca]
default_ca = test
[test]
database = $work/index
serial = $work/serial
new_certs_dir = $work
default_md = sha256
policy = any
x509_extensions = leaf
[any]
commonName = supplied
[leaf]
basicConstraints = CA:FALSE
subjectAltName = $2
END
    openssl ca -batch -notext -config "$work/ca.cnf" -create_serial -cert authority.crt \
        -keyfile "$work/authority.key" -in "$work/$1.csr" -out "$work/$1.crt" -startdate "$3" -enddate "$4"
    cat "$work/$1.crt" "$work/$1.key" > "$1.pem"
}

sign localhost DNS:localhost,IP:127.0.0.1 20200101000000Z 21200101000000Z
sign elsewhere DNS:elsewhere.example 20200101000000Z 21200101000000Z
sign expired DNS:localhost,IP:127.0.0.1 20200101000000Z 20200102000000Z
sign client DNS:client.example 20200101000000Z 21200101000000Z
openssl ec -in "$work/client.key" -aes256 -passout pass:test-password -out client-with-password.key
rm -r "$work"
